// RUN: mpmd-opt %s -mpmd-infer-mesh-finalize -split-input-file -verify-diagnostics

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!h1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="pinned_host">
// expected-error@+1 {{Argument 0 has different memory kinds assigned to it.}}
func.func @kinds(%a: tensor<4xf32>) -> (!m1, !h1) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %0 = mpmd.assign %a : (tensor<4xf32>) -> !m1
  %1 = mpmd.assign %a : (tensor<4xf32>) -> !h1
  return %0, %1 : !m1, !h1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
func.func @no_transfer(%a: !m1) -> !m2 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  // expected-error@+1 {{assigns, unassigns or broadcasts are not allowed}}
  %u = mpmd.unassign %f : (!m1) -> tensor<4xf32>
  // expected-error@+1 {{assigns, unassigns or broadcasts are not allowed}}
  %x = mpmd.assign %u : (tensor<4xf32>) -> !m2
  return %x : !m2
}

// -----

// expected-error@+2 {{function input 0 is not a MeshTensorType}}
// expected-error@+1 {{function output 0 is not a MeshTensorType}}
func.func @meshless(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  // expected-error@+1 {{no more meshless ops are expected at this point.}}
  %0 = stablehlo.negate %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}

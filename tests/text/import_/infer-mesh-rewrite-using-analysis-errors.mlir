// RUN: mpmd-opt %s -mpmd-infer-mesh-rewrite-using-analysis -split-input-file -verify-diagnostics

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
func.func @main(%a: tensor<4xf32>) -> (!m1, !m2)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  // expected-error@+1 {{a loop carries value 0, which is needed on several meshes: m1, m2}}
  %0 = mpmd.for (%a) {iterations = 2 : ui32, unroll_factor = 1 : ui32, arg_attrs = [{mpmd.use_set = #mpmd.meshes_with_origins<"m1", "m2">}, {}]} (%p: tensor<4xf32>, %i: tensor<ui32>) {
    mpmd.return %p : tensor<4xf32>
  } : tensor<4xf32>
  %x = mpmd.assign %0 : (tensor<4xf32>) -> !m1
  %y = mpmd.assign %0 : (tensor<4xf32>) -> !m2
  return %x, %y : !m1, !m2
}

// -----

func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  // expected-error@+1 {{@body is called by an MPMD function, but has no topology of its own}}
  %0 = mpmd.call @body(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @body(%p: tensor<4xf32>) -> tensor<4xf32> {
  return %p : tensor<4xf32>
}

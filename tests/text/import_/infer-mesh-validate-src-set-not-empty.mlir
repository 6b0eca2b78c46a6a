// RUN: mpmd-opt %s -mpmd-infer-mesh-populate-src-set -mpmd-infer-mesh-validate-src-set-not-empty -split-input-file -verify-diagnostics
// RUN: not mpmd-opt %s -mpmd-infer-mesh-populate-src-set -mpmd-infer-mesh-validate-src-set-not-empty='error-limit=1' -split-input-file 2>&1 | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// Only the first op of a chain is an error.
func.func @conflict(%a: !m1, %b: !m2) -> tensor<4xf32> attributes {topology = #topology} {
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %v = mpmd.unassign %b : (!m2) -> tensor<4xf32>
  // expected-error@+1 {{Mesh assignment is not possible for op as its operands are on conflicting meshes}}
  %0 = stablehlo.subtract %u, %v : tensor<4xf32>
  %1 = stablehlo.negate %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

func.func @reduction(%a: !m1, %b: !m2) -> tensor<4xf32> attributes {topology = #topology} {
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %v = mpmd.unassign %b : (!m2) -> tensor<4xf32>
  // expected-error@+1 {{infer_cross_mesh_reductions=True}}
  %0 = stablehlo.add %u, %v : tensor<4xf32>
  %1 = stablehlo.add %0, %u : tensor<4xf32>
  return %1 : tensor<4xf32>
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

func.func @caller(%a: !m1, %b: !m2) -> (tensor<4xf32>, tensor<4xf32>) attributes {topology = #topology} {
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %v = mpmd.unassign %b : (!m2) -> tensor<4xf32>
  %0 = mpmd.call @f(%u) : (tensor<4xf32>) -> tensor<4xf32>
  %1 = mpmd.call @f(%v) : (tensor<4xf32>) -> tensor<4xf32>
  return %0, %1 : tensor<4xf32>, tensor<4xf32>
}

// expected-error@+1 {{Mesh assignment is not possible for arg0 of mpmd.call "f" as its caller operands are on conflicting meshes}}
func.func private @f(%p: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  return %p : tensor<4xf32>
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

func.func @fine(%a: !m1, %b: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %0 = stablehlo.subtract %u, %b : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// With a limit of one the second is not told of.
// CHECK-COUNT-4: error:
// CHECK-NOT:     error:
func.func @two(%a: !m1, %b: !m2) -> (tensor<4xf32>, tensor<4xf32>) attributes {topology = #topology} {
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %v = mpmd.unassign %b : (!m2) -> tensor<4xf32>
  // expected-error@+1 {{Mesh assignment is not possible for op as its operands are on conflicting meshes}}
  %0 = stablehlo.subtract %u, %v : tensor<4xf32>
  // expected-error@+1 {{Mesh assignment is not possible for op as its operands are on conflicting meshes}}
  %1 = stablehlo.divide %u, %v : tensor<4xf32>
  return %0, %1 : tensor<4xf32>, tensor<4xf32>
}

// RUN: mpmd-opt %s -mpmd-validate-no-backward-deps -split-input-file -verify-diagnostics
// RUN: not mpmd-opt %s -mpmd-validate-no-backward-deps='fail-on-backward-deps=true' -split-input-file 2>&1 | FileCheck %s

// CHECK: error: Detected backward dependency
// CHECK: error: Expected forward-only program but found non-forward fragments.
// CHECK-NEXT: "f"(1) is transposed

// m2 comes before m10: meshes count by their numbers.

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m10 = !mpmd.mesh_tensor<"m10", tensor<4xf32>>

func.func @p(%p: tensor<4xf32>) -> tensor<4xf32> attributes {mesh_shape = #sdy.mesh<["x"=2]>} {
  return %p : tensor<4xf32>
}

func.func public @main(%a: !m2) -> !m2 attributes {topology = #mpmd.topology<<"m2" : <["x"=2]>>, <"m10" : <["x"=2]>>>} {
  %0 = mpmd.fragment_call<mesh="m2", origin=["f"]> @p(%a) : (!m2) -> !m2
  %1 = mpmd.transfer %0 : (!m2) -> !m10
  %2 = mpmd.fragment_call<mesh="m10", origin=[]> @p(%1) : (!m10) -> !m10
  %3 = mpmd.transfer %2 : (!m10) -> !m10
  %4 = mpmd.transfer %3 : (!m10) -> !m2
  // expected-warning@+1 {{fragment "p" mesh="m10" produces a value consumed by fragment "p" mesh="m2"}}
  %5 = mpmd.fragment_call<mesh="m2", origin=["g"]> @p(%4) : (!m2) -> !m2
  return %5 : !m2
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

func.func @p(%p: tensor<4xf32>) -> tensor<4xf32> attributes {mesh_shape = #sdy.mesh<["x"=2]>} {
  return %p : tensor<4xf32>
}

// Gradients flow back.

func.func public @training(%a: !m2) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  %0 = mpmd.fragment_call<mesh="m2", origin=["f"(1)]> @p(%a) : (!m2) -> !m2
  %1 = mpmd.transfer %0 : (!m2) -> !m1
  %2 = mpmd.fragment_call<mesh="m1", origin=["f"(1)]> @p(%1) : (!m1) -> !m1
  return %2 : !m1
}

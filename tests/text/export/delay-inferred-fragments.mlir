// RUN: mpmd-opt %s -mpmd-delay-inferred-fragments | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// The chain i, j moves as a whole; the transfer of j counts as its first user; k, which nobody reads, stays.

// CHECK-LABEL: func.func public @main
// CHECK:       inferred_by = ["k"]
// CHECK:       origin=["f"]>
// CHECK:       %[[I:.*]] = mpmd.fragment{{.*}}inferred_by = ["i"]
// CHECK:       %[[J:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[I]]) {mpmd.inferred_by = ["j"]}
// CHECK:       mpmd.transfer %[[J]]
// CHECK:       origin=["g"]> (%[[J]])
func.func public @main(%a: !m1) -> (!m1, !m1, !m1) attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["i"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %j = mpmd.fragment<mesh="m1", origin=[]> (%i) {mpmd.inferred_by = ["j"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["k"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %j : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%j) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %t, %g : !m1, !m1, !m1
}

// A callee stays as it is.

// CHECK-LABEL: func.func private @callee
// CHECK:       origin=[]>
// CHECK:       origin=["f"]>
func.func private @callee(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["i"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %i, %f : !m1, !m1
}

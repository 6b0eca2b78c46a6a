// RUN: mpmd-opt %s -mpmd-issue-reductions -split-input-file | FileCheck %s

// "m1" waits for "m0" before its second fragment: the sum of what its first one made fits in there.

!m0 = !mpmd.mesh_tensor<"m0", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m0" : <["x"=2]>>, <"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @in_a_wait
// CHECK:       %[[LAST:.*]] = mpmd.fragment<mesh="m1", origin=["s1"]>
// CHECK:       origin=["s0"]>
// CHECK:       origin=["s0"]>
// CHECK:       %[[SUM:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[LAST]])
// CHECK:       mpmd.fragment<mesh="m1", origin=["s1"]>
// CHECK:       mpmd.fragment<mesh="m1", origin=["s1"]>
func.func public @in_a_wait(%a: !m0, %b: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %l = mpmd.fragment<mesh="m1", origin=["s1"]> (%b) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m0", origin=["s0"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m0) -> !m0
  %g = mpmd.fragment<mesh="m0", origin=["s0"]> (%f) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m0) -> !m0
  %t = mpmd.transfer %g : (!m0) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["s1"]> (%t) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["s1"]> (%h) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %s = mpmd.fragment<mesh="m1", origin=[]> (%l) {mpmd.inferred_by = ["defer_reductions"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %s, %k : !m1, !m1
}

// -----

// It stays where no fragment waits after all that it reads, and other unnamed work stays in any case.

!m0 = !mpmd.mesh_tensor<"m0", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m0" : <["x"=2]>>, <"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @without_a_wait
// CHECK:       origin=["s1"]>
// CHECK:       origin=["s0"]>
// CHECK:       origin=["s0"]>
// CHECK:       origin=["s1"]>
// CHECK:       origin=["s1"]>
// CHECK:       inferred_by = ["other"]
// CHECK:       inferred_by = ["defer_reductions"]
func.func public @without_a_wait(%a: !m0, %b: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %l = mpmd.fragment<mesh="m1", origin=["s1"]> (%b) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m0", origin=["s0"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m0) -> !m0
  %g = mpmd.fragment<mesh="m0", origin=["s0"]> (%f) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m0) -> !m0
  %t = mpmd.transfer %g : (!m0) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["s1"]> (%t) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["s1"]> (%h) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %o = mpmd.fragment<mesh="m1", origin=[]> (%l) {mpmd.inferred_by = ["other"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %s = mpmd.fragment<mesh="m1", origin=[]> (%h) {mpmd.inferred_by = ["defer_reductions"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %s, %o : !m1, !m1
}

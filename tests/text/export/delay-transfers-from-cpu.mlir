// RUN: mpmd-opt %s -mpmd-delay-transfers-from-cpu | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!c1 = !mpmd.mesh_tensor<"m1/cpu", tensor<4xf32>>
!h1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="pinned_host">
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m1/cpu" : <["x"=2]>>>

// From a host mesh and from host memory: late. To the host, between devices, and unused: where they stood.

// CHECK-LABEL: func.func public @main
// CHECK-NEXT:  mpmd.transfer %arg0 : (!mpmd.mesh_tensor<"m1", tensor<4xf32>>) -> !mpmd.mesh_tensor<"m1/cpu"
// CHECK-NEXT:  mpmd.transfer %arg0 : (!mpmd.mesh_tensor<"m1", tensor<4xf32>>) -> !mpmd.mesh_tensor<"m1", tensor<4xf32>>
// CHECK-NEXT:  mpmd.transfer %arg1
// CHECK-NEXT:  %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK:       %[[S:.*]] = mpmd.transfer %arg1
// CHECK:       %[[T:.*]] = mpmd.transfer %arg2
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["g"]> (%[[S]], %[[T]])
func.func public @main(%a: !m1, %b: !c1, %c: !h1) -> (!c1, !m1, !m1, !m1) attributes {topology = #topology} {
  %s = mpmd.transfer %b : (!c1) -> !m1
  %t = mpmd.transfer %c : (!h1) -> !m1
  %u = mpmd.transfer %a : (!m1) -> !c1
  %v = mpmd.transfer %a : (!m1) -> !m1
  %w = mpmd.transfer %b : (!c1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%s, %t) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %u, %v, %f, %g : !c1, !m1, !m1, !m1
}

// What is late already, also behind another transfer.

// CHECK-LABEL: func.func public @late_already
// CHECK-NEXT:  %[[S:.*]] = mpmd.transfer %arg0
// CHECK-NEXT:  %[[T:.*]] = mpmd.transfer %[[S]]
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["f"]> (%[[T]])
func.func public @late_already(%a: !c1) -> !m1 attributes {topology = #topology} {
  %s = mpmd.transfer %a : (!c1) -> !h1
  %t = mpmd.transfer %s : (!h1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%t) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

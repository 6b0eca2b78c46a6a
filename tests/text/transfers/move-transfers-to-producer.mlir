// RUN: mpmd-opt %s -mpmd-move-transfers-to-producer -split-input-file | FileCheck %s

// Transfers of arguments go to the begin, last one first; a transfer of a transfer follows it.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m3 = !mpmd.mesh_tensor<"m3", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]] = mpmd.transfer %[[ARG0]] : {{.*}} -> !mpmd.mesh_tensor<"m3"
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[ARG1]] : {{.*}} -> !mpmd.mesh_tensor<"m3"
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.transfer %[[V2]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V4:.*]] = mpmd.transfer %[[V3]] : {{.*}} -> !mpmd.mesh_tensor<"m3"
// CHECK-NEXT: %[[V5:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[V2]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.negate %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V5]], %[[V1]], %[[V0]], %[[V4]]
func.func public @main(%a: !m1, %b: !m2) -> (!m1, !m3, !m3, !m3) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%f_: tensor<4xf32>) {
    %x = stablehlo.negate %f_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %s = mpmd.transfer %b : (!m2) -> !m3
  %t = mpmd.transfer %a : (!m1) -> !m3
  %u = mpmd.transfer %f : (!m1) -> !m2
  %v = mpmd.transfer %u : (!m2) -> !m3
  return %g, %s, %t, %v : !m1, !m3, !m3, !m3
}

// -----

// One transfer that stands where it belongs.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: return %[[V1]]
func.func public @main(%a: !m1) -> !m2 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2
  return %t : !m2
}

// -----

// Equal transfers that nothing tells apart change places, and so nothing changes.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m3 = !mpmd.mesh_tensor<"m3", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.transfer %[[ARG0]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m3"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[ARG0]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: mpmd.transfer %[[V2]] : {{.*}} -> !mpmd.mesh_tensor<"m3"
// CHECK-NEXT: return %[[ARG0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %s = mpmd.transfer %a : (!m1) -> !m2
  %t = mpmd.transfer %s : (!m2) -> !m3
  %u = mpmd.transfer %a : (!m1) -> !m2
  %v = mpmd.transfer %u : (!m2) -> !m3
  return %a : !m1
}

// RUN: mpmd-opt %s -mpmd-remove-transfer-cycles -split-input-file | FileCheck %s

// There and back: the value itself is used; the way there stays until dead code goes.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m3 = !mpmd.mesh_tensor<"m3", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[V1]] : {{.*}} -> !mpmd.mesh_tensor<"m3"
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[V0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V3]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %s = mpmd.transfer %f : (!m1) -> !m2
  %t = mpmd.transfer %s : (!m2) -> !m3
  %u = mpmd.transfer %t : (!m3) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%u) (%u_: tensor<4xf32>) {
    %x = stablehlo.negate %u_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

// -----

// An identity transfer is its operand; of two equal values on the way the closest one is used.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.transfer %[[ARG0]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m2 attributes {topology = #topology} {
  %s = mpmd.transfer %a : (!m1) -> !m2
  %t = mpmd.transfer %s : (!m2) -> !m1
  %u = mpmd.transfer %t : (!m1) -> !m1
  %v = mpmd.transfer %u : (!m1) -> !m2
  return %v : !m2
}

// -----

// A way through host memory is kept, and so is one that ends in another memory.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m1_device = !mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="device">
!m1_pinned_host = !mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="pinned_host">
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.transfer %[[ARG0]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[ARG1]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V3:.*]] = mpmd.transfer %[[V2]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: return %[[V1]], %[[V3]]
func.func public @main(%a: !m1, %b: !m1_device) -> (!m1, !m1) attributes {topology = #topology} {
  %s = mpmd.transfer %a : (!m1) -> !m1_pinned_host
  %t = mpmd.transfer %s : (!m1_pinned_host) -> !m1
  %u = mpmd.transfer %b : (!m1_device) -> !m2
  %v = mpmd.transfer %u : (!m2) -> !m1
  return %t, %v : !m1, !m1
}

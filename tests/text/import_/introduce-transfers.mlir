// RUN: mpmd-opt %s -mpmd-introduce-transfers | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m10 = !mpmd.mesh_tensor<"m10", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m10" : <["x"=2]>>>

// A chain in mesh order, before the first of the assigns: m2 comes before m10.
// CHECK-LABEL: func @chain
func.func @chain(%a: !m1) -> (!m10, !m2, !m1) attributes {topology = #topology} {
  // CHECK-NEXT: %[[T2:.*]] = mpmd.transfer %arg0 : {{.*}}"m1"{{.*}} -> {{.*}}"m2"
  // CHECK-NEXT: %[[T10:.*]] = mpmd.transfer %[[T2]] : {{.*}}"m2"{{.*}} -> {{.*}}"m10"
  // CHECK-NEXT: return %[[T10]], %[[T2]], %arg0
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %x = mpmd.assign %u : (tensor<4xf32>) -> !m10
  %y = mpmd.assign %u : (tensor<4xf32>) -> !m2
  %z = mpmd.assign %u : (tensor<4xf32>) -> !m1
  return %x, %y, %z : !m10, !m2, !m1
}

// A transfer that stands later is moved up and used.
// CHECK-LABEL: func @existing_transfer
func.func @existing_transfer(%a: !m1) -> (!m2, !m2) attributes {topology = #topology} {
  // CHECK-NEXT: %[[T:.*]] = mpmd.transfer %arg0
  // CHECK-NEXT: return %[[T]], %[[T]]
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %x = mpmd.assign %u : (tensor<4xf32>) -> !m2
  %t = mpmd.transfer %a : (!m1) -> !m2
  return %x, %t : !m2, !m2
}

// A sum of gradients from several meshes is done where it is needed.
// CHECK-LABEL: func @sum
func.func @sum(%a: !m1, %b: !m2, %c: !m10) -> !m1 attributes {topology = #topology} {
  // CHECK:      %[[TB:.*]] = mpmd.transfer %arg1
  // CHECK:      %[[S:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%arg0, %[[TB]]) {mpmd.inferred_by = ["introduce_transfers"]}
  // CHECK-NEXT:   stablehlo.add
  // CHECK:      %[[TC:.*]] = mpmd.transfer %arg2
  // CHECK:      %[[R:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[S]], %[[TC]]) {mpmd.inferred_by = ["introduce_transfers"]}
  // CHECK-NEXT:   stablehlo.add
  // CHECK:      return %[[R]]
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %v = mpmd.unassign %b : (!m2) -> tensor<4xf32>
  %w = mpmd.unassign %c : (!m10) -> tensor<4xf32>
  %s = stablehlo.add %u, %v : tensor<4xf32>
  %t = stablehlo.add %s, %w : tensor<4xf32>
  %x = mpmd.assign %t : (tensor<4xf32>) -> !m1
  return %x : !m1
}

// A sum that has another use, or another op in it, is left to mesh inference.
// CHECK-LABEL: func @no_sum
func.func @no_sum(%a: !m1, %b: !m2) -> (!m1, tensor<4xf32>, !m2) attributes {topology = #topology} {
  // CHECK: %[[S:.*]] = stablehlo.add
  // CHECK: mpmd.assign %[[S]]
  // CHECK: stablehlo.multiply
  // CHECK: mpmd.assign
  // CHECK-NOT: mpmd.fragment
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %v = mpmd.unassign %b : (!m2) -> tensor<4xf32>
  %s = stablehlo.add %u, %v : tensor<4xf32>
  %x = mpmd.assign %s : (tensor<4xf32>) -> !m1
  %p = stablehlo.multiply %u, %v : tensor<4xf32>
  %y = mpmd.assign %p : (tensor<4xf32>) -> !m2
  return %x, %s, %y : !m1, tensor<4xf32>, !m2
}

// All calls give the argument a value of m1: the callee transfers it.
// CHECK-LABEL: func @caller
func.func @caller(%a: !m1, %b: !m1) -> (!m2, !m2) attributes {topology = #topology} {
  // CHECK: mpmd.call @callee
  // CHECK: mpmd.call @callee
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %v = mpmd.unassign %b : (!m1) -> tensor<4xf32>
  %x = mpmd.call @callee(%u) : (tensor<4xf32>) -> !m2
  %y = mpmd.call @callee(%v) : (tensor<4xf32>) -> !m2
  return %x, %y : !m2, !m2
}

// CHECK-LABEL: func private @callee
func.func private @callee(%p: tensor<4xf32>) -> !m2 attributes {topology = #topology} {
  // CHECK-NEXT: %[[A:.*]] = mpmd.assign %arg0 : {{.*}}"m1"
  // CHECK-NEXT: %[[T:.*]] = mpmd.transfer %[[A]]
  // CHECK-NEXT: return %[[T]]
  %x = mpmd.assign %p : (tensor<4xf32>) -> !m2
  return %x : !m2
}

// Not if one of them is in another memory.
// CHECK-LABEL: func @two_memories
func.func @two_memories(%a: !m1, %b: !mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="pinned_host">) -> (!m2, !m2)
    attributes {topology = #topology} {
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %v = mpmd.unassign %b : (!mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="pinned_host">) -> tensor<4xf32>
  %0 = mpmd.call @of_two(%u) : (tensor<4xf32>) -> !m2
  %1 = mpmd.call @of_two(%v) : (tensor<4xf32>) -> !m2
  return %0, %1 : !m2, !m2
}
// CHECK-LABEL: func private @of_two
func.func private @of_two(%p: tensor<4xf32>) -> !m2 attributes {topology = #topology} {
  // CHECK-NEXT: %[[X:.*]] = mpmd.assign %arg0 {{.*}} -> !mpmd.mesh_tensor<"m2"
  // CHECK-NEXT: return %[[X]]
  %x = mpmd.assign %p : (tensor<4xf32>) -> !m2
  return %x : !m2
}

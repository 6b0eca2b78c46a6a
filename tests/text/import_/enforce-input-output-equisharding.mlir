// RUN: mpmd-opt %s -mpmd-enforce-input-output-equisharding='constraints=0:1,1:0' | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func @one_pair_differs
// CHECK-SAME: -> (!mpmd.mesh_tensor<"m2", tensor<4xf32>>, !mpmd.mesh_tensor<"m1", tensor<4xf32>>)
func.func @one_pair_differs(%a: !m1, %b: !m2) -> (!m2, !m2) attributes {topology = #topology} {
  // CHECK-NEXT: %[[T:.*]] = mpmd.transfer %arg1 : {{.*}}"m2"{{.*}} -> {{.*}}"m1"
  // CHECK-NEXT: return %arg1, %[[T]]
  return %b, %b : !m2, !m2
}

// CHECK-LABEL: func @all_is_well
func.func @all_is_well(%a: !m1, %b: !m2) -> (!m2, !m1) attributes {topology = #topology} {
  // CHECK-NEXT: return %arg1, %arg0
  return %b, %a : !m2, !m1
}

!w2 = !mpmd.mesh_tensor<"m2", tensor<8xf32>>

// A result of another shape is on the mesh of its argument, and keeps its type.
// CHECK-LABEL: func @another_shape
func.func @another_shape(%a: !m1, %b: !m2, %c: !w2) -> (!m2, !w2) attributes {topology = #topology} {
  // CHECK-NEXT: %[[T:.*]] = mpmd.transfer %arg2 : {{.*}}"m2", tensor<8xf32>>) -> {{.*}}"m1", tensor<8xf32>>
  // CHECK-NEXT: return %arg1, %[[T]]
  return %b, %c : !m2, !w2
}

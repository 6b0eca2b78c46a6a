// RUN: mpmd-opt %s -mpmd-copy-scalar-results='meshes=m1,m2,m3 max-ops=3' | FileCheck %s

!m1_i32 = !mpmd.mesh_tensor<"m1", tensor<i32>>
!m2_i32 = !mpmd.mesh_tensor<"m2", tensor<i32>>
!m1_i1 = !mpmd.mesh_tensor<"m1", tensor<i1>>
!m1_f32 = !mpmd.mesh_tensor<"m1", tensor<f32>>
!m1_4 = !mpmd.mesh_tensor<"m1", tensor<4xi32>>
!m4_i32 = !mpmd.mesh_tensor<"m4", tensor<i32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>, <"m4" : <["x"=2]>>>

// A count, whether it is the last, and a count of m2 that comes from an argument of m1: each is computed on the
// other meshes too, those of one mesh together.

// CHECK-LABEL: func.func public @counts(
// CHECK-SAME:  -> (!mpmd.mesh_tensor<"m1", tensor<i32>>, !mpmd.mesh_tensor<"m1", tensor<i1>>, !mpmd.mesh_tensor<"m2", tensor<i32>>,
// CHECK-SAME:  !mpmd.mesh_tensor<"m1", tensor<i32>> {mpmd.copy_of = 2 : i64}
// CHECK-SAME:  !mpmd.mesh_tensor<"m2", tensor<i32>> {mpmd.copy_of = 0 : i64}
// CHECK-SAME:  !mpmd.mesh_tensor<"m2", tensor<i1>> {mpmd.copy_of = 1 : i64}
// CHECK-SAME:  !mpmd.mesh_tensor<"m3", tensor<i32>> {mpmd.copy_of = 0 : i64}
// CHECK-SAME:  !mpmd.mesh_tensor<"m3", tensor<i1>> {mpmd.copy_of = 1 : i64}
// CHECK-SAME:  !mpmd.mesh_tensor<"m3", tensor<i32>> {mpmd.copy_of = 2 : i64})
// CHECK:       %[[F:.*]]:2 = mpmd.fragment<mesh="m1", origin=[]> (%arg0)
// CHECK:       %[[G:.*]] = mpmd.fragment<mesh="m2", origin=["g"]>
// CHECK:       %[[X:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%arg0) {mpmd.inferred_by = ["copy_scalar_results"]}
// CHECK-NEXT:    stablehlo.negate
// CHECK-NEXT:    mpmd.return
// CHECK:       %[[B:.*]] = mpmd.transfer %arg0 : {{.*}} -> !mpmd.mesh_tensor<"m2", tensor<i32>>
// CHECK-NEXT:  %[[Y:.*]]:2 = mpmd.fragment<mesh="m2", origin=[]> (%[[B]]) {mpmd.inferred_by = ["copy_scalar_results"]} (%[[P:[^:]*]]
// CHECK-NEXT:    %[[ONE:.*]] = stablehlo.constant dense<1>
// CHECK-NEXT:    %[[NEXT:.*]] = stablehlo.add %[[P]], %[[ONE]]
// CHECK-NEXT:    %[[LAST:.*]] = stablehlo.compare EQ, %[[P]], %[[ONE]]
// CHECK-NEXT:    mpmd.return %[[NEXT]], %[[LAST]]
// CHECK:       %[[Z:.*]]:3 = mpmd.fragment<mesh="m3", origin=[]>
// CHECK:       return %[[F]]#0, %[[F]]#1, %[[G]], %[[X]], %[[Y]]#0, %[[Y]]#1, %[[Z]]#0, %[[Z]]#1, %[[Z]]#2
func.func public @counts(%n: !m1_i32) -> (!m1_i32, !m1_i1, !m2_i32) attributes {topology = #topology} {
  %f:2 = mpmd.fragment<mesh="m1", origin=[]> (%n) (%p: tensor<i32>) {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %x = stablehlo.add %p, %one : tensor<i32>
    %y = stablehlo.compare EQ, %p, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
    mpmd.return %x, %y : tensor<i32>, tensor<i1>
  } : (!m1_i32) -> (!m1_i32, !m1_i1)
  %t = mpmd.transfer %n : (!m1_i32) -> !m2_i32
  %g = mpmd.fragment<mesh="m2", origin=["g"]> (%t) (%p: tensor<i32>) {
    %x = stablehlo.negate %p : tensor<i32>
    mpmd.return %x : tensor<i32>
  } : (!m2_i32) -> !m2_i32
  return %f#0, %f#1, %g : !m1_i32, !m1_i1, !m2_i32
}

// Others stay where they are: numbers that are rounded, arrays, results of other fragments, of many ops, of a
// mesh that is not one of those.

// CHECK-LABEL: func.func public @others(
// CHECK-NOT:   copy_scalar_results
// CHECK:       return %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}} :
func.func public @others(%n: !m1_i32, %r: !m1_f32, %v: !m1_4, %k: !m4_i32)
    -> (!m1_f32, !m1_4, !m1_i32, !m1_i32, !m4_i32) attributes {topology = #topology} {
  %f:4 = mpmd.fragment<mesh="m1", origin=[]> (%n, %r, %v) (%p: tensor<i32>, %q: tensor<f32>, %s: tensor<4xi32>) {
    %x = stablehlo.add %q, %q : tensor<f32>
    %y = stablehlo.add %s, %s : tensor<4xi32>
    %z = stablehlo.add %p, %p : tensor<i32>
    %z1 = stablehlo.negate %z : tensor<i32>
    %z2 = stablehlo.add %z1, %p : tensor<i32>
    %z3 = stablehlo.multiply %z2, %p : tensor<i32>
    mpmd.return %x, %y, %z3, %z : tensor<f32>, tensor<4xi32>, tensor<i32>, tensor<i32>
  } : (!m1_i32, !m1_f32, !m1_4) -> (!m1_f32, !m1_4, !m1_i32, !m1_i32)
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f#3) (%p: tensor<i32>) {
    %x = stablehlo.negate %p : tensor<i32>
    mpmd.return %x : tensor<i32>
  } : (!m1_i32) -> !m1_i32
  %h = mpmd.fragment<mesh="m4", origin=["h"]> (%k) (%p: tensor<i32>) {
    %x = stablehlo.negate %p : tensor<i32>
    mpmd.return %x : tensor<i32>
  } : (!m4_i32) -> !m4_i32
  return %f#0, %f#1, %f#2, %g, %h : !m1_f32, !m1_4, !m1_i32, !m1_i32, !m4_i32
}

// RUN: mpmd-opt %s -mpmd-uniquify-function-inputs-outputs -split-input-file | FileCheck %s

// One fragment per mesh copies arguments, and values that are returned twice.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V4]], %[[ARG2]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]]#1 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]]:3 = mpmd.fragment<mesh="m1", origin=[]> (%[[V0]]#0, %[[ARG0]]) {mpmd.inferred_by = ["uniquify"]} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   mpmd.return %[[ARG2]], %[[ARG2]], %[[ARG3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]]:2 = mpmd.fragment<mesh="m2", origin=[]> (%[[ARG1]]) {mpmd.inferred_by = ["uniquify"]} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   mpmd.return %[[ARG2]], %[[ARG2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V2]]#0, %[[V3]]#0, %[[V2]]#2, %[[V1]], %[[V2]]#1, %[[V3]]#1, %[[V0]]#1
func.func public @main(%a: !m1, %b: !m2) -> (!m1, !m2, !m1, !m2, !m1, !m2, !m1) attributes {topology = #topology} {
  %f, %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x, %a_ : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!m1, !m1)
  %t = mpmd.transfer %g : (!m1) -> !m2
  return %f, %b, %a, %t, %f, %b, %g : !m1, !m2, !m1, !m2, !m1, !m2, !m1
}

// -----

// Every result is a value of its own already.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V1]], %[[ARG1]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]#1, %[[V0]]#0
func.func public @main(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f, %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x, %a_ : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!m1, !m1)
  return %g, %f : !m1, !m1
}

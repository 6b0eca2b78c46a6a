// RUN: mpmd-opt %s -mpmd-merge-inferred-fragments=merge-any-consumer=true -split-input-file | FileCheck %s

// The first user that is allowed, here behind one that is not.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.abs %[[V2]]
// CHECK-NEXT:   mpmd.return %[[V2]], %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[V0]]#0) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]], %[[V0]]#1
func.func public @main(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%f_: tensor<4xf32>) {
    %y = stablehlo.negate %f_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %i = mpmd.fragment<mesh="m1", origin=[]> (%f) {mpmd.inferred_by = ["w"]} (%f_: tensor<4xf32>) {
    %z = stablehlo.abs %f_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1) -> !m1
  return %g, %i : !m1, !m1
}

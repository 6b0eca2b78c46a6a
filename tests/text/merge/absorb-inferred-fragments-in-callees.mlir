// RUN: mpmd-opt %s -mpmd-absorb-inferred-fragments -split-input-file | FileCheck %s

// Entry points are left alone, callees are not.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[ARG0]]) {mpmd.inferred_by = ["w"]} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[V0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.call @body(%[[V1]])
// CHECK-NEXT: return %[[V2]]
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.negate %[[V1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %p = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%p) (%p_: tensor<4xf32>) {
    %x = stablehlo.negate %p_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.call @body(%f) : (!m1) -> !m1
  return %g : !m1
}
func.func private @body(%a: !m1) -> !m1 attributes {topology = #topology} {
  %p = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%p) (%p_: tensor<4xf32>) {
    %x = stablehlo.negate %p_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

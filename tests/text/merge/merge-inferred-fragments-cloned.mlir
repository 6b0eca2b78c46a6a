// RUN: mpmd-opt %s -mpmd-merge-inferred-fragments=clone-inferred-fragments=true -split-input-file \
// RUN:   | FileCheck %s

// Each user gets a clone of one cheap op, the function's return too; chains follow.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[V2]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.multiply %[[V3]], %[[V3]]
// CHECK-NEXT:   mpmd.return %[[V2]], %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[V2]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.abs %[[V3]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]#1, %[[V1]], %[[V0]]#0
func.func public @main(%a: !m1) -> (!m1, !m1, !m1) attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=[]> (%i) {mpmd.inferred_by = ["w"]} (%i_: tensor<4xf32>) {
    %x = stablehlo.negate %i_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%k) (%k_: tensor<4xf32>) {
    %x = stablehlo.multiply %k_, %k_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%k) (%k_: tensor<4xf32>) {
    %x = stablehlo.abs %k_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g, %i : !m1, !m1, !m1
}

// -----

// Two ops are not cheap: the second user reads the first one's result.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.abs %[[V2]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.multiply %[[V3]], %[[V3]]
// CHECK-NEXT:   mpmd.return %[[V3]], %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[V0]]#0) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]#1, %[[V1]]
func.func public @main(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    %y = stablehlo.abs %x : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%i) (%i_: tensor<4xf32>) {
    %x = stablehlo.multiply %i_, %i_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%i) (%i_: tensor<4xf32>) {
    %x = stablehlo.negate %i_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g : !m1, !m1
}

// -----

// One op, but it may be done only once: the second user reads what the first one has drawn.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @effects
// CHECK-COUNT-1: custom_call @draw
// CHECK-NOT:   custom_call
// CHECK:       {{^ *return}}
func.func public @effects(%a: !m1) -> (!m1, !m1) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %0 = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%p: tensor<4xf32>) {
    %1 = stablehlo.custom_call @draw(%p) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%0) (%p: tensor<4xf32>) {
    %1 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%0) (%p: tensor<4xf32>) {
    %1 = stablehlo.abs %p : tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g : !m1, !m1
}

// RUN: mpmd-opt %s -mpmd-absorb-inferred-fragments=absorb-on-entry-point-function=true -split-input-file \
// RUN:   | FileCheck %s

// A named fragment swallows what comes before and behind it, transfers in the way move; it keeps its attributes.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"], stage=2> (%[[ARG0]], %[[ARG1]]) {call_counter = 1 : ui32, split_keep_transferred} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.multiply %[[ARG3]], %[[V2]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.subtract %[[V3]], %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V2]], %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: return %[[V1]], %[[V0]]#1
func.func public @main(%a: !m1, %b: !m1) -> (!m2, !m1) attributes {topology = #topology} {
  %p = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["first"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %p : (!m1) -> !m2
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=2> (%b, %p) {call_counter = 1 : ui32, split_keep_transferred} (%b_: tensor<4xf32>, %p_: tensor<4xf32>) {
    %x = stablehlo.multiply %b_, %p_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  %c = mpmd.fragment<mesh="m1", origin=[]> (%f, %b) {mpmd.inferred_by = ["second"]} (%f_: tensor<4xf32>, %b_: tensor<4xf32>) {
    %x = stablehlo.subtract %f_, %b_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %t, %c : !m2, !m1
}

// -----

// An unused transfer in the way vanishes; constants come first, equal ones once.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<2.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[CST_0:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[ARG1]], %[[CST_0]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[V3]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.multiply %[[CST_0]], %[[CST]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.add %[[V4]], %[[V5]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m2", origin=["g"]> () () {
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   mpmd.return %[[CST]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]], %[[V2]]
func.func public @main(%a: !m1) -> (!m1, !m2) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %c = stablehlo.constant dense<1.0> : tensor<4xf32>
    %x = stablehlo.add %a_, %c : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %p = mpmd.fragment<mesh="m1", origin=[]> (%f) {mpmd.inferred_by = ["first"]} (%f_: tensor<4xf32>) {
    %y = stablehlo.negate %f_ : tensor<4xf32>
    %c = stablehlo.constant dense<1.0> : tensor<4xf32>
    %d = stablehlo.constant dense<2.0> : tensor<4xf32>
    %z = stablehlo.multiply %c, %d : tensor<4xf32>
    %w = stablehlo.add %y, %z : tensor<4xf32>
    mpmd.return %w : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %p : (!m1) -> !m2
  %g = mpmd.fragment<mesh="m2", origin=["g"]> () () {
    %c = stablehlo.constant dense<1.0> : tensor<4xf32>
    mpmd.return %c : tensor<4xf32>
  } : () -> !m2
  return %p, %g : !m1, !m2
}

// -----

// Of two named users the first absorbs; of two named producers the last.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[V2]]
// CHECK-NEXT:   mpmd.return %[[V2]], %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[V0]]#0, %[[V0]]#1) (%[[ARG1:[^:]*]]{{.*}}, %[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.abs %[[ARG1]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.subtract %[[V2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %p = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%p) (%p_: tensor<4xf32>) {
    %x = stablehlo.negate %p_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%p) (%p_: tensor<4xf32>) {
    %x = stablehlo.abs %p_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %c = mpmd.fragment<mesh="m1", origin=[]> (%g, %f) {mpmd.inferred_by = ["w"]} (%g_: tensor<4xf32>, %f_: tensor<4xf32>) {
    %x = stablehlo.subtract %g_, %f_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %c : !m1
}

// -----

// Unnamed work absorbs unnamed work where it stands alone; both makers are kept.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[ARG0]]) {mpmd.inferred_by = ["right", "left"]} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.negate %[[V1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %p = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["left"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %q = mpmd.fragment<mesh="m1", origin=[]> (%p) {mpmd.inferred_by = ["right"]} (%p_: tensor<4xf32>) {
    %x = stablehlo.negate %p_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %q : !m1
}

// -----

// Two named fragments, and fragments of different meshes, are not merged.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[V0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[V1]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m2", origin=[]> (%[[V2]]) {mpmd.inferred_by = ["w"]} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.abs %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V3]]
func.func public @main(%a: !m1) -> !m2 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%f_: tensor<4xf32>) {
    %x = stablehlo.negate %f_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %g : (!m1) -> !m2
  %c = mpmd.fragment<mesh="m2", origin=[]> (%t) {mpmd.inferred_by = ["w"]} (%t_: tensor<4xf32>) {
    %x = stablehlo.abs %t_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m2) -> !m2
  return %c : !m2
}

// -----

// What nothing uses keeps none apart: without %dead the first user of %p is %f.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[X:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[Y:.*]] = stablehlo.negate %[[X]]
// CHECK-NEXT:   mpmd.return %[[Y]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[F]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %p = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["p"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %dead = mpmd.fragment<mesh="m1", origin=["dead"]> (%p) (%p_: tensor<4xf32>) {
    %x = stablehlo.abs %p_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%p) (%p_: tensor<4xf32>) {
    %x = stablehlo.negate %p_ : tensor<4xf32>
    %unused = stablehlo.tanh %p_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

// What the unnamed work reads, too, comes from the named fragment by way of another mesh: it cannot move up to that.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

// CHECK-LABEL: func.func public @apart
// CHECK:       %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK:       %[[T:.*]] = mpmd.transfer
// CHECK:       %[[U:.*]] = mpmd.transfer %[[T]]
// CHECK:       mpmd.fragment<mesh="m1", origin=[]> (%[[F]], %[[U]])
func.func public @apart(%a: !m1) -> (!m1, !m2) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %x = stablehlo.add %p, %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2
  %u = mpmd.transfer %t : (!m2) -> !m1
  %i = mpmd.fragment<mesh="m1", origin=[]> (%f, %u) {mpmd.inferred_by = ["w"]} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %y = stablehlo.subtract %p, %q : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %i, %t : !m1, !m2
}

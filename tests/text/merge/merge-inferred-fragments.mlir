// RUN: mpmd-opt %s -mpmd-merge-inferred-fragments -split-input-file | FileCheck %s

// With the closest user, at its place; what others use of the producer is returned first.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%[[ARG0]], %[[ARG1]]) {call_counter = 2 : ui32} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG2]], %[[ARG3]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.negate %[[ARG2]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.subtract %[[V1]], %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V2]], %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]#1, %[[V0]]#0
func.func public @main(%a: !m1, %b: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %i, %k = mpmd.fragment<mesh="m1", origin=[]> (%a, %b) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>, %b_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %b_ : tensor<4xf32>
    %y = stablehlo.negate %a_ : tensor<4xf32>
    mpmd.return %x, %y : tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1) -> (!m1, !m1)
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%b, %i) {call_counter = 2 : ui32} (%b_: tensor<4xf32>, %i_: tensor<4xf32>) {
    %z = stablehlo.subtract %i_, %b_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %f, %k : !m1, !m1
}

// -----

// One operand, one result, one use: operands stay in place, and one may come twice.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG1]], %[[ARG0]], %[[ARG0]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.negate %[[ARG4]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.multiply %[[ARG2]], %[[ARG3]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.subtract %[[V2]], %[[V1]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1, %b: !m1) -> !m1 attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.negate %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%b, %a, %i) (%b_: tensor<4xf32>, %a_: tensor<4xf32>, %i_: tensor<4xf32>) {
    %y = stablehlo.multiply %b_, %a_ : tensor<4xf32>
    %z = stablehlo.subtract %y, %i_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1, !m1, !m1) -> !m1
  return %f : !m1
}

// -----

// A transfer stands before the user: the user moves up to the producer, if what it reads is there.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m3 = !mpmd.mesh_tensor<"m3", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.subtract %[[V5]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V5]], %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[ARG1]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V3:.*]]:2 = mpmd.fragment<mesh="m1", origin=["g"]> (%[[ARG0]], %[[V2]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.abs %[[ARG2]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.subtract %[[V5]], %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V5]], %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V4:.*]] = mpmd.transfer %[[V3]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m3"
// CHECK-NEXT: return %[[V0]]#1, %[[V1]], %[[V3]]#1, %[[V4]]
func.func public @main(%a: !m1, %b: !m2) -> (!m1, !m2, !m1, !m3) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2
  %i = mpmd.fragment<mesh="m1", origin=[]> (%f, %a) {mpmd.inferred_by = ["w"]} (%f_: tensor<4xf32>, %a_: tensor<4xf32>) {
    %y = stablehlo.subtract %f_, %a_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.abs %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %u = mpmd.transfer %b : (!m2) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=[]> (%g, %u) {mpmd.inferred_by = ["w"]} (%g_: tensor<4xf32>, %u_: tensor<4xf32>) {
    %y = stablehlo.subtract %g_, %u_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  %s = mpmd.transfer %g : (!m1) -> !m3
  return %i, %t, %k, %s : !m1, !m2, !m1, !m3
}

// -----

// Counters that differ: the named fragment's; makers of two unnamed ones are united; unused ones vanish.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 2 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.abs %[[V1]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.tanh %[[V2]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {call_counter = 1 : ui32, mpmd.inferred_by = ["p", "q"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.negate %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=[]> (%i) {call_counter = 1 : ui32, mpmd.inferred_by = ["q", "r"]} (%i_: tensor<4xf32>) {
    %x = stablehlo.abs %i_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%k) {call_counter = 2 : ui32, remat} (%k_: tensor<4xf32>) {
    %x = stablehlo.tanh %k_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %u = mpmd.fragment<mesh="m1", origin=["u"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.exponential %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

// The closest user is not allowed: nothing is tried beyond it. The halves of a split stay apart.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[V0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[V0]]) {mpmd.inferred_by = ["w"]} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.abs %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m1", origin=["h"(1)]> (%[[V1]]) {split_keep_transferred} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.exponential %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V4:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[V3]]) {mpmd.inferred_by = ["w"], split_drop_transferred} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.tanh %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V2]], %[[V4]]
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
  %h = mpmd.fragment<mesh="m1", origin=["h"(1)]> (%g) {split_keep_transferred} (%g_: tensor<4xf32>) {
    %z = stablehlo.exponential %g_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=[]> (%h) {mpmd.inferred_by = ["w"], split_drop_transferred} (%h_: tensor<4xf32>) {
    %z = stablehlo.tanh %h_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1) -> !m1
  return %i, %k : !m1, !m1
}

// -----

// An unnamed producer of several named fragments goes to the first one.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["g"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[V2]]
// CHECK-NEXT:   mpmd.return %[[V2]], %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[V0]]#0) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.abs %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]#1, %[[V1]]
func.func public @main(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%i) (%i_: tensor<4xf32>) {
    %y = stablehlo.negate %i_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%i) (%i_: tensor<4xf32>) {
    %z = stablehlo.abs %i_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1) -> !m1
  return %g, %f : !m1, !m1
}

// -----

// What has effects stays, though nothing reads it.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @effects
// CHECK:       custom_call @show
// CHECK:       {{^ *return}}
func.func public @effects(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %0 = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%p: tensor<4xf32>) {
    stablehlo.custom_call @show(%p) {has_side_effect = true} : (tensor<4xf32>) -> ()
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %a : !m1
}

// -----

// What the user reads comes after a transfer of the producer: neither of the two can move.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

// CHECK-LABEL: func.func public @apart
// CHECK:       mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK:       %[[T:.*]] = mpmd.transfer
// CHECK:       %[[U:.*]] = mpmd.transfer
// CHECK:       mpmd.fragment<mesh="m1", origin=[]> (%0, %[[U]])
func.func public @apart(%a: !m1, %b: !m2) -> (!m1, !m2) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
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

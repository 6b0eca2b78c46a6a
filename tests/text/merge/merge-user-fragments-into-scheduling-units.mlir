// RUN: mpmd-opt %s -mpmd-merge-user-fragments-into-scheduling-units -split-input-file -verify-diagnostics \
// RUN:   | FileCheck %s

// Named work of one microbatch, phase and stage becomes one fragment; work without a stage joins.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f", "g", "h"], stage=1> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[V3]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.abs %[[V4]]
// CHECK-NEXT:   mpmd.return %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["h"], stage=1> (%[[V0]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.abs %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m1", origin=["h"(1), "g"(1)], stage=1> (%[[V1]], %[[V1]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]{{.*}}, %[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.tanh %[[ARG1]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.multiply %[[V3]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V2]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=1> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%f_: tensor<4xf32>) {
    %y = stablehlo.negate %f_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["h"], stage=1> (%g) {call_counter = 0 : ui32} (%g_: tensor<4xf32>) {
    %y = stablehlo.abs %g_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["h"], stage=1> (%h) {call_counter = 1 : ui32} (%h_: tensor<4xf32>) {
    %y = stablehlo.abs %h_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %b = mpmd.fragment<mesh="m1", origin=["h"(1)], stage=1> (%k) {call_counter = 1 : ui32} (%k_: tensor<4xf32>) {
    %z = stablehlo.tanh %k_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1) -> !m1
  %c = mpmd.fragment<mesh="m1", origin=["g"(1)], stage=1> (%b, %k) {call_counter = 1 : ui32} (%b_: tensor<4xf32>, %k_: tensor<4xf32>) {
    %z = stablehlo.multiply %b_, %k_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %c : !m1
}

// -----

// Other stages, unnamed work, and work that is joined through another mesh only stay apart.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["g"], stage=1> (%[[V0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[V1]]) {mpmd.inferred_by = ["w"]} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.exponential %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.transfer %[[V2]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V4:.*]] = mpmd.transfer %[[V3]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V5:.*]] = mpmd.fragment<mesh="m1", origin=["h"], stage=1> (%[[V4]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.abs %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V5]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"], stage=1> (%f) {call_counter = 0 : ui32} (%f_: tensor<4xf32>) {
    %y = stablehlo.negate %f_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %i = mpmd.fragment<mesh="m1", origin=[]> (%g) {mpmd.inferred_by = ["w"]} (%g_: tensor<4xf32>) {
    %y = stablehlo.exponential %g_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %i : (!m1) -> !m2
  %s = mpmd.transfer %t : (!m2) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["h"], stage=1> (%s) {call_counter = 0 : ui32} (%s_: tensor<4xf32>) {
    %y = stablehlo.abs %s_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %h : !m1
}

// -----

// Work of two phases is neither forward nor backward.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  // expected-error@+1 {{"f", "f"(1) on mesh "m1": its parts were transposed a different number of times}}
  %f = mpmd.fragment<mesh="m1", origin=["f", "f"(1)]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%f_: tensor<4xf32>) {
    %y = stablehlo.negate %f_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

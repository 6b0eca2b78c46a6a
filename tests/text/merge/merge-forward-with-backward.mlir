// RUN: mpmd-opt %s -mpmd-merge-forward-with-backward -split-input-file -verify-diagnostics | FileCheck %s

// Forward, then backward next on the mesh; the fragment of another mesh between them does not count.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f", "f"(1)]> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.multiply %[[V3]], %[[V3]]
// CHECK-NEXT:   mpmd.return %[[V3]], %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m2", origin=["g"]> (%[[ARG1]], %[[V1]]) {call_counter = 0 : ui32} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.subtract %[[ARG2]], %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]#1, %[[V2]]
func.func public @main(%a: !m1, %c: !m2) -> (!m1, !m2) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2
  %g = mpmd.fragment<mesh="m2", origin=["g"]> (%c, %t) {call_counter = 0 : ui32} (%c_: tensor<4xf32>, %t_: tensor<4xf32>) {
    %x = stablehlo.subtract %c_, %t_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m2, !m2) -> !m2
  %b = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f) {call_counter = 0 : ui32} (%f_: tensor<4xf32>) {
    %y = stablehlo.multiply %f_, %f_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %b, %g : !m1, !m2
}

// -----

// Microbatches differ: the counter goes.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f", "f"(1)]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.multiply %[[V1]], %[[V1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %b = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f) {call_counter = 1 : ui32} (%f_: tensor<4xf32>) {
    %y = stablehlo.multiply %f_, %f_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %b : !m1
}

// -----

// Another fragment of the mesh stands between, and backward before forward is nothing to merge.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[ARG0]]) {mpmd.inferred_by = ["w"]} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.abs %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[V0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.multiply %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[V2]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]], %[[V3]]
func.func public @main(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.abs %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %b = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f) {call_counter = 0 : ui32} (%f_: tensor<4xf32>) {
    %y = stablehlo.multiply %f_, %f_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%b) {call_counter = 1 : ui32} (%b_: tensor<4xf32>) {
    %y = stablehlo.negate %b_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %i, %g : !m1, !m1
}

// -----

// A program belongs to one stage: two stages are two fragments.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK: mpmd.fragment<mesh="m1", origin=["f"], stage=0>
// CHECK: mpmd.fragment<mesh="m1", origin=["f"(1)], stage=1>
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %b = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=1> (%f) {call_counter = 0 : ui32} (%f_: tensor<4xf32>) {
    %y = stablehlo.multiply %f_, %f_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %b : !m1
}

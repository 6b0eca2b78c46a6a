// RUN: mpmd-opt %s -mpmd-from-unroll-to-call-counter -split-input-file | FileCheck %s

// The iteration replaces a counter that is there; other ops keep theirs.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.call @body(%[[ARG0]]) {call_counter = 5 : ui32}
// CHECK-NEXT: %[[V1:.*]] = mpmd.call @body(%[[V0]]) {call_counter = 6 : ui32}
// CHECK-NEXT: %[[V2:.*]] = mpmd.call @body(%[[V1]]) {call_counter = 7 : ui32}
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[V2]]) {unroll_counter = 5 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V3]]
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V1]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %x = mpmd.call @body(%a) {unroll_counter = 5 : ui32} : (!m1) -> !m1
  %y = mpmd.call @body(%x) {call_counter = 9 : ui32, unroll_counter = 6 : ui32} : (!m1) -> !m1
  %z = mpmd.call @body(%y) {call_counter = 7 : ui32} : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%z) {unroll_counter = 5 : ui32} (%z_: tensor<4xf32>) {
    %p = stablehlo.add %z_, %z_ : tensor<4xf32>
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}
func.func private @body(%p: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%p) (%p_: tensor<4xf32>) {
    %y = stablehlo.add %p_, %p_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// RUN: mpmd-opt %s -mpmd-inline -symbol-dce -split-input-file | FileCheck %s

// Ordinary calls in calls, and in regions, become plain ops; microbatches stay calls.

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.negate %[[ARG0]]
// CHECK-NEXT: %[[V1:.*]] = stablehlo.negate %[[V0]]
// CHECK-NEXT: %[[V2:.*]] = mpmd.named_computation<"f"> (%[[V1]]) (%[[ARG1:[^:]*]]: tensor<4xf32>) {
// CHECK-NEXT: %[[V4:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT: mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.call @once(%[[V2]])
// CHECK-NEXT: return %[[V3]]
// CHECK-LABEL: func.func private @once(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.negate %[[ARG0]]
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @twice(%a) : (tensor<4xf32>) -> tensor<4xf32>
  %1 = mpmd.named_computation<"f"> (%0) (%b: tensor<4xf32>) {
    %2 = func.call @once(%b) : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %3 = mpmd.call @once(%1) : (tensor<4xf32>) -> tensor<4xf32>
  return %3 : tensor<4xf32>
}
func.func private @twice(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @once(%a) : (tensor<4xf32>) -> tensor<4xf32>
  %1 = call @once(%0) : (tensor<4xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}
func.func private @once(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// Functions that call each other cannot be inlined.

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = call @even(%[[ARG0]])
// CHECK-NEXT: return %[[V0]]
// CHECK-LABEL: func.func private @even(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = call @odd(%[[ARG0]])
// CHECK-NEXT: return %[[V0]]
// CHECK-LABEL: func.func private @odd(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = call @even(%[[ARG0]])
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @even(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @even(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @odd(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @odd(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @even(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A function of several blocks stays.

// CHECK-LABEL: func.func public @main(
// CHECK-NEXT: call @jumping(
// CHECK-LABEL: func.func private @jumping(
func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @jumping(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @jumping(%a: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %a : tensor<4xf32>
}

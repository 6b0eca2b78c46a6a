// RUN: mpmd-opt %s -mpmd-unroll-for-loops -split-input-file -verify-diagnostics | FileCheck %s

// Counters go on from loop to loop, indices begin again; an iteration may return its arguments and its index.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG1:[^:]*]]: tensor<ui32>
// CHECK-NEXT: %[[C:.*]] = stablehlo.constant {unroll_counter = 0 : ui32} dense<0> : tensor<ui32>
// CHECK-NEXT: %[[V0:.*]] = mpmd.call @body(%[[ARG0]], %[[C]]) {unroll_counter = 0 : ui32}
// CHECK-NEXT: %[[C_0:.*]] = stablehlo.constant {unroll_counter = 1 : ui32} dense<1> : tensor<ui32>
// CHECK-NEXT: %[[V1:.*]] = mpmd.call @body(%[[V0]], %[[C_0]]) {unroll_counter = 1 : ui32}
// CHECK-NEXT: %[[C_1:.*]] = stablehlo.constant {unroll_counter = 2 : ui32} dense<0> : tensor<ui32>
// CHECK-NEXT: %[[V2:.*]] = stablehlo.add %[[V1]], %[[V1]] {unroll_counter = 2
// CHECK-NEXT: return %[[V2]], %[[C_0]]
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG1:[^:]*]]: tensor<ui32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.add %[[ARG0]], %[[ARG0]]
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: tensor<4xf32>, %n: tensor<ui32>) -> (tensor<4xf32>, tensor<ui32>) attributes {topology = #topology} {
  %x, %y = mpmd.for (%a, %n) {iterations = 2 : ui32, unroll_factor = 2 : ui32} (%a_: tensor<4xf32>, %n_: tensor<ui32>, %i: tensor<ui32>) {
    %c = mpmd.call @body(%a_, %i) : (tensor<4xf32>, tensor<ui32>) -> tensor<4xf32>
    mpmd.return %c, %i : tensor<4xf32>, tensor<ui32>
  } : tensor<4xf32>, tensor<ui32>
  %v = mpmd.for (%x) {iterations = 1 : ui32, unroll_factor = 1 : ui32} (%x_: tensor<4xf32>, %j: tensor<ui32>) {
    %s = stablehlo.add %x_, %x_ : tensor<4xf32>
    mpmd.return %s : tensor<4xf32>
  } : tensor<4xf32>
  return %v, %y : tensor<4xf32>, tensor<ui32>
}
func.func private @body(%p: tensor<4xf32>, %i: tensor<ui32>) -> tensor<4xf32> attributes {topology = #topology} {
  %s = stablehlo.add %p, %p : tensor<4xf32>
  return %s : tensor<4xf32>
}

// -----

// No loop.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.add %[[ARG0]], %[[ARG0]]
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %s = stablehlo.add %a, %a : tensor<4xf32>
  return %s : tensor<4xf32>
}

// -----

// A loop must be unrolled completely.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // expected-error@+1 {{a loop of 4 iterations has the unroll factor 2}}
  %x = mpmd.for (%a) {iterations = 4 : ui32, unroll_factor = 2 : ui32} (%a_: tensor<4xf32>, %i: tensor<ui32>) {
    %s = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %s : tensor<4xf32>
  } : tensor<4xf32>
  return %x : tensor<4xf32>
}

// -----

// A loop must not stand in a loop.

func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  // expected-error@+2 {{Nested fori loops aren't supported}}
  %0 = mpmd.for (%a) {iterations = 2 : ui32, unroll_factor = 2 : ui32} (%b: tensor<4xf32>, %i: tensor<ui32>) {
    %1 = mpmd.for (%b) {iterations = 2 : ui32, unroll_factor = 2 : ui32} (%c: tensor<4xf32>, %j: tensor<ui32>) {
      mpmd.return %c : tensor<4xf32>
    } : tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : tensor<4xf32>
  return %0 : tensor<4xf32>
}

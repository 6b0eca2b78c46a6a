// RUN: mpmd-opt %s -mpmd-simplify-named-computations | FileCheck %s

#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// A value that `jax.checkpoint` captures and the computation only passes on leaves by the shortest way.
// CHECK-LABEL: func @barrier_lane
func.func @barrier_lane(%a: tensor<4xf32>, %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #topology} {
  // CHECK-NEXT: %[[F:.*]] = mpmd.named_computation<"f"> (%arg0) (%arg2: tensor<4xf32>) {
  // CHECK-NEXT:   %[[KEPT:.*]] = stablehlo.optimization_barrier %arg2
  // CHECK-NEXT:   %[[SUM:.*]] = stablehlo.add %[[KEPT]], %[[KEPT]]
  // CHECK-NEXT:   mpmd.return %[[SUM]]
  // CHECK:      %[[W:.*]] = stablehlo.add %[[F]], %[[F]]
  // CHECK-NEXT: return %[[W]], %arg1
  %0:3 = mpmd.named_computation<"f"> (%a, %b) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %1:2 = stablehlo.optimization_barrier %p, %q : tensor<4xf32>, tensor<4xf32>
    %2 = stablehlo.add %1#0, %1#0 : tensor<4xf32>
    mpmd.return %2, %2, %1#1 : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
  } : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>)
  %3 = stablehlo.add %0#0, %0#1 : tensor<4xf32>
  return %3, %0#2 : tensor<4xf32>, tensor<4xf32>
}

// One that passes a value on makes the next one's operands equal.
// CHECK-LABEL: func @chain
func.func @chain(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: %[[G:.*]] = mpmd.named_computation<"g"> (%arg0) (%arg1: tensor<4xf32>) {
  // CHECK-NEXT:   stablehlo.multiply %arg1, %arg1
  // CHECK-NEXT:   mpmd.return
  // CHECK:      return %[[G]]
  %0 = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %1 = mpmd.named_computation<"g"> (%a, %0) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %2 = stablehlo.multiply %p, %q : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

// What nothing uses goes, with what only it needed; effects stay.
// CHECK-LABEL: func @unused
func.func @unused(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: mpmd.named_computation<"print"> (%arg1)
  // CHECK-NEXT:   stablehlo.custom_call @print
  // CHECK-NEXT:   mpmd.return
  // CHECK-NEXT: }
  // CHECK-NEXT: return %arg0
  %0:2 = mpmd.named_computation<"f"> (%a, %b) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %1 = stablehlo.negate %q : tensor<4xf32>
    mpmd.return %p, %1 : tensor<4xf32>, tensor<4xf32>
  } : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %2 = mpmd.named_computation<"print"> (%b) (%p: tensor<4xf32>) {
    %3 = stablehlo.custom_call @print(%p) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %3 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0#0 : tensor<4xf32>
}

// CHECK-LABEL: func @nothing_to_do
func.func @nothing_to_do(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: mpmd.named_computation<"f"> (%arg0, %arg1) (%arg2: tensor<4xf32>, %arg3: tensor<4xf32>) {
  // CHECK-NEXT:   stablehlo.add %arg2, %arg3
  %0 = mpmd.named_computation<"f"> (%a, %b) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %1 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// What stands around and is not used does not count as a use: f's first result, and then %arg0, are not needed.
// CHECK-LABEL: func @dead_around
func.func @dead_around(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: %[[F:.*]] = mpmd.named_computation<"f"> (%arg1) (%[[P:.*]]: tensor<4xf32>) {
  // CHECK-NEXT:   %[[X:.*]] = stablehlo.negate %[[P]]
  // CHECK-NEXT:   mpmd.return %[[X]]
  // CHECK-NEXT: }
  // CHECK-NEXT: %[[H:.*]] = mpmd.named_computation<"h"> (%[[F]])
  // CHECK-NEXT:   stablehlo.tanh
  // CHECK-NEXT:   mpmd.return
  // CHECK-NEXT: }
  // CHECK-NEXT: return %[[H]]
  %0:2 = mpmd.named_computation<"f"> (%a, %b) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %5 = stablehlo.add %p, %p : tensor<4xf32>
    %6 = stablehlo.negate %q : tensor<4xf32>
    mpmd.return %5, %6 : tensor<4xf32>, tensor<4xf32>
  } : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %1 = stablehlo.add %0#0, %b : tensor<4xf32>
  %2 = mpmd.named_computation<"h"> (%0#1, %1) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %7 = stablehlo.tanh %p : tensor<4xf32>
    mpmd.return %7 : tensor<4xf32>
  } : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %2 : tensor<4xf32>
}

// An unused sharding constraint says how a value that is used is sharded: it stays, and is no work left to do.
// CHECK-LABEL: func @unused_constraint
func.func @unused_constraint(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: mpmd.named_computation<"f"> (%arg0) (%[[P:.*]]: tensor<4xf32>) {
  // CHECK-NEXT:   sdy.sharding_constraint %[[P]]
  // CHECK-NEXT:   %[[X:.*]] = stablehlo.negate %[[P]]
  // CHECK-NEXT:   mpmd.return %[[X]]
  // CHECK-NEXT: }
  // CHECK-NEXT: sdy.sharding_constraint %arg0
  // CHECK-NEXT: return
  %0 = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
    %1 = sdy.sharding_constraint %p <mesh<["x"=2]>, [{"x"}]> : tensor<4xf32>
    %2 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %3 = sdy.sharding_constraint %a <mesh<["x"=2]>, [{"x"}]> : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// RUN: mpmd-opt %s -mpmd-insert-nameless-clone-of-negligible-ops | FileCheck %s

#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func @constant_used_outside
func.func @constant_used_outside(%a: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) attributes {topology = #topology} {
  // CHECK-NEXT: %[[F:.*]]:2 = mpmd.named_computation<"f"> () () {
  // CHECK-NEXT:   stablehlo.iota
  // CHECK-NEXT:   stablehlo.negate
  // CHECK-NEXT:   mpmd.return
  // CHECK:      %[[IOTA:.*]] = stablehlo.iota dim = 0
  // CHECK-NEXT: %[[SUM:.*]] = stablehlo.add %arg0, %[[IOTA]]
  // CHECK-NEXT: return %[[SUM]], %[[F]]#0
  %0:2 = mpmd.named_computation<"f"> () () {
    %1 = stablehlo.iota dim = 0 : tensor<4xf32>
    %2 = stablehlo.negate %1 : tensor<4xf32>
    mpmd.return %1, %2 : tensor<4xf32>, tensor<4xf32>
  } : () -> (tensor<4xf32>, tensor<4xf32>)
  %3 = stablehlo.add %a, %0#0 : tensor<4xf32>
  return %3, %0#0 : tensor<4xf32>, tensor<4xf32>
}

// What an op with effects makes is made once.
// CHECK-LABEL: func @effects_are_not_repeated
func.func @effects_are_not_repeated(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK: stablehlo.custom_call
  // CHECK-NOT: stablehlo.custom_call
  // CHECK: return
  %0 = mpmd.named_computation<"f"> () () {
    %1 = stablehlo.custom_call @draw() {has_side_effect = true} : () -> tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : () -> tensor<4xf32>
  %2 = stablehlo.add %a, %0 : tensor<4xf32>
  return %2 : tensor<4xf32>
}

// From the inside out: what a computation returns of one in it is seen through.
// CHECK-LABEL: func @computation_in_computation
func.func @computation_in_computation(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: mpmd.named_computation<"f"> () () {
  // CHECK-NEXT:   mpmd.named_computation<"g"> () () {
  // CHECK-NEXT:     stablehlo.iota
  // CHECK-NEXT:     mpmd.return
  // CHECK-NEXT:   }
  // CHECK-NEXT:   %[[INNER:.*]] = stablehlo.iota
  // CHECK-NEXT:   mpmd.return %[[INNER]]
  // CHECK-NEXT: }
  // CHECK-NEXT: %[[OUTER:.*]] = stablehlo.iota
  // CHECK-NEXT: stablehlo.add %arg0, %[[OUTER]]
  %0 = mpmd.named_computation<"f"> () () {
    %1 = mpmd.named_computation<"g"> () () {
      %2 = stablehlo.iota dim = 0 : tensor<4xf32>
      mpmd.return %2 : tensor<4xf32>
    } : () -> tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : () -> tensor<4xf32>
  %3 = stablehlo.add %a, %0 : tensor<4xf32>
  return %3 : tensor<4xf32>
}

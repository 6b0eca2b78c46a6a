// RUN: mpmd-opt %s -mpmd-infer-mesh-convert-reduce-ops | FileCheck %s --check-prefixes=CHECK,TAGGED
// RUN: mpmd-opt %s -mpmd-infer-mesh-convert-reduce-ops='infer-cross-mesh-reductions=true' | FileCheck %s --check-prefixes=CHECK,ALL

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// What the user tagged is converted, through ops with one operand; a chain becomes one reduce.
// CHECK-LABEL: func @tagged
func.func @tagged(%a: tensor<4xf32>, %b: tensor<4xf32>, %c: tensor<4xf32>) -> tensor<4xf32>
    attributes {topology = #topology} {
  // CHECK-NEXT: %[[R:.*]] = mpmd.reduce<add> {mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">} %arg0, %arg1, %arg2
  // CHECK-NEXT: %[[N:.*]] = stablehlo.negate %[[R]]
  // CHECK-NEXT: mpmd.reduce<none> %[[N]]
  %0 = stablehlo.add %a, %b {mpmd.reduce = #mpmd.reduction<add>, mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">} : tensor<4xf32>
  %1 = stablehlo.add %0, %c {mpmd.reduce = #mpmd.reduction<add>, mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">} : tensor<4xf32>
  %2 = stablehlo.negate %1 : tensor<4xf32>
  %3 = mpmd.reduce<none> %2 : (tensor<4xf32>) -> tensor<4xf32>
  return %3 : tensor<4xf32>
}

// CHECK-LABEL: func @only_marked
func.func @only_marked(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // TAGGED-NEXT: stablehlo.maximum %arg0, %arg1 {mpmd.reduce = #mpmd.reduction<max>}
  // ALL-NEXT: mpmd.reduce<max> %arg0, %arg1
  %0 = stablehlo.maximum %a, %b {mpmd.reduce = #mpmd.reduction<max>} : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// A reduction of pieces that were joined along a dim of size 1 is one of the pieces.
// CHECK-LABEL: func @joined
func.func @joined(%a: tensor<1x4xf32>, %b: tensor<1x4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // TAGGED: stablehlo.concatenate
  // ALL:      %[[A:.*]] = stablehlo.reshape %arg0
  // ALL-NEXT: %[[B:.*]] = stablehlo.reshape %arg1
  // ALL-NEXT: %[[R:.*]] = mpmd.reduce<mul> %[[A]], %[[B]]
  // ALL-NEXT: return %[[R]]
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %0 = "stablehlo.concatenate"(%a, %b) <{dimension = 0 : i64}> {mpmd.reduce = #mpmd.reduction<mul>} : (tensor<1x4xf32>, tensor<1x4xf32>) -> tensor<2x4xf32>
  %1 = stablehlo.reduce(%0 init: %one) applies stablehlo.multiply across dimensions = [0] {mpmd.reduce = #mpmd.reduction<mul>} : (tensor<2x4xf32>, tensor<f32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

// CHECK-LABEL: func @unmarked
func.func @unmarked(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: stablehlo.add
  // CHECK-NEXT: mpmd.reduce<none>
  %0 = stablehlo.add %a, %b : tensor<4xf32>
  %1 = mpmd.reduce<none> %0 : (tensor<4xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

// What was noted on what made a piece is noted on the piece.
// CHECK-LABEL: func @noted
func.func @noted(%a: tensor<1x4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // ALL:      %[[N:.*]] = stablehlo.negate
  // ALL:      stablehlo.reshape %[[N]] {mpmd.src_set = #mpmd.meshes_with_origins<"m1">, mpmd.use_set = #mpmd.meshes_with_origins<"m2">}
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %n = stablehlo.negate %a {mpmd.src_set = #mpmd.meshes_with_origins<"m1">, mpmd.use_set = #mpmd.meshes_with_origins<"m2">} : tensor<1x4xf32>
  %0 = "stablehlo.concatenate"(%a, %n) <{dimension = 0 : i64}> {mpmd.reduce = #mpmd.reduction<mul>} : (tensor<1x4xf32>, tensor<1x4xf32>) -> tensor<2x4xf32>
  %1 = stablehlo.reduce(%0 init: %one) applies stablehlo.multiply across dimensions = [0] {mpmd.reduce = #mpmd.reduction<mul>} : (tensor<2x4xf32>, tensor<f32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

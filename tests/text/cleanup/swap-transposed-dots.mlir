// RUN: mpmd-opt %s -mpmd-swap-transposed-dots -split-input-file | FileCheck %s

// The gradient of a weight as JAX writes it: the factors change places and the transpose is gone.

// CHECK-LABEL: func.func @gradient
// CHECK-SAME:    (%[[X:.*]]: tensor<4x8xf32>, %[[Y:.*]]: tensor<4x16xf32>)
// CHECK-NEXT:    %[[T:.*]] = stablehlo.dot_general %[[X]], %[[Y]], contracting_dims = [0] x [0], precision = [HIGH, DEFAULT]
// CHECK-SAME:      (tensor<4x8xf32>, tensor<4x16xf32>) -> tensor<8x16xf32>
// CHECK-NEXT:    return %[[T]]
func.func @gradient(%x: tensor<4x8xf32>, %y: tensor<4x16xf32>) -> tensor<8x16xf32> {
  %0 = stablehlo.dot_general %y, %x, contracting_dims = [0] x [0], precision = [DEFAULT, HIGH] : (tensor<4x16xf32>, tensor<4x8xf32>) -> tensor<16x8xf32>
  %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<16x8xf32>) -> tensor<8x16xf32>
  return %1 : tensor<8x16xf32>
}

// -----

// Batch dims stay in front.

// CHECK-LABEL: func.func @batched
// CHECK-NEXT:    stablehlo.dot_general %arg1, %arg0, batching_dims = [0] x [0], contracting_dims = [2] x [1]
// CHECK-NEXT:    return
func.func @batched(%a: tensor<3x4x8xf32>, %b: tensor<3x5x4xf32>) -> tensor<3x5x8xf32> {
  %0 = stablehlo.dot_general %a, %b, batching_dims = [0] x [0], contracting_dims = [1] x [2] : (tensor<3x4x8xf32>, tensor<3x5x4xf32>) -> tensor<3x8x5xf32>
  %1 = stablehlo.transpose %0, dims = [0, 2, 1] : (tensor<3x8x5xf32>) -> tensor<3x5x8xf32>
  return %1 : tensor<3x5x8xf32>
}

// -----

// A transpose that is no swap of the factors' dims, and a product that is also read as it is, stay.

// CHECK-LABEL: func.func @no_swap
// CHECK-NEXT:    stablehlo.dot_general
// CHECK-NEXT:    stablehlo.transpose
func.func @no_swap(%a: tensor<4x8x2xf32>, %b: tensor<4x5xf32>) -> tensor<2x8x5xf32> {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0] : (tensor<4x8x2xf32>, tensor<4x5xf32>) -> tensor<8x2x5xf32>
  %1 = stablehlo.transpose %0, dims = [1, 0, 2] : (tensor<8x2x5xf32>) -> tensor<2x8x5xf32>
  return %1 : tensor<2x8x5xf32>
}

// CHECK-LABEL: func.func @two_uses
// CHECK-NEXT:    stablehlo.dot_general
// CHECK-NEXT:    stablehlo.transpose
func.func @two_uses(%a: tensor<4x8xf32>, %b: tensor<4x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>) {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0] : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0, %1 : tensor<8x8xf32>, tensor<8x8xf32>
}

// RUN: mpmd-opt %s -mpmd-scale-smaller-factor -split-input-file | FileCheck %s

// A softmax forward: its sum is divided out after the product, which is smaller.

// CHECK-LABEL: func.func @to_result
// CHECK-SAME:    (%[[E:.*]]: tensor<2x64x32xf32>, %[[S:.*]]: tensor<2x64x1xf32>, %[[V:.*]]: tensor<2x32x8xf32>)
// CHECK:         %[[D:.*]] = stablehlo.dot_general %[[E]], %[[V]], batching_dims = [0] x [0], contracting_dims = [2] x [1], precision = [HIGH, DEFAULT]
// CHECK-NEXT:    %[[R:.*]] = stablehlo.reshape %[[S]] : (tensor<2x64x1xf32>) -> tensor<2x64xf32>
// CHECK-NEXT:    %[[B:.*]] = stablehlo.broadcast_in_dim %[[R]], dims = [0, 1] : (tensor<2x64xf32>) -> tensor<2x64x8xf32>
// CHECK-NEXT:    %[[Q:.*]] = stablehlo.divide %[[D]], %[[B]]
// CHECK-NEXT:    return %[[Q]]
func.func @to_result(%e: tensor<2x64x32xf32>, %s: tensor<2x64x1xf32>, %v: tensor<2x32x8xf32>) -> tensor<2x64x8xf32> {
  %0 = stablehlo.broadcast_in_dim %s, dims = [0, 1, 2] : (tensor<2x64x1xf32>) -> tensor<2x64x32xf32>
  %1 = stablehlo.divide %e, %0 : tensor<2x64x32xf32>
  %2 = stablehlo.dot_general %1, %v, batching_dims = [0] x [0], contracting_dims = [2] x [1], precision = [HIGH, DEFAULT] : (tensor<2x64x32xf32>, tensor<2x32x8xf32>) -> tensor<2x64x8xf32>
  return %2 : tensor<2x64x8xf32>
}

// -----

// The same backward: the scale runs along what is contracted.  The scaled factor may stand on the right.

// CHECK-LABEL: func.func @to_factor
// CHECK-SAME:    (%[[E:.*]]: tensor<64x32xf32>, %[[R:.*]]: tensor<64xf32>, %[[D:.*]]: tensor<64x8xf32>)
// CHECK:         %[[B:.*]] = stablehlo.broadcast_in_dim %[[R]], dims = [0] : (tensor<64xf32>) -> tensor<64x8xf32>
// CHECK-NEXT:    %[[S:.*]] = stablehlo.multiply %[[D]], %[[B]]
// CHECK-NEXT:    %[[Y:.*]] = stablehlo.dot_general %[[S]], %[[E]], contracting_dims = [0] x [0]
// CHECK-NEXT:    return %[[Y]]
func.func @to_factor(%e: tensor<64x32xf32>, %r: tensor<64xf32>, %d: tensor<64x8xf32>) -> tensor<8x32xf32> {
  %0 = stablehlo.broadcast_in_dim %r, dims = [0] : (tensor<64xf32>) -> tensor<64x32xf32>
  %1 = stablehlo.multiply %0, %e : tensor<64x32xf32>
  %2 = stablehlo.dot_general %d, %1, contracting_dims = [0] x [0] : (tensor<64x8xf32>, tensor<64x32xf32>) -> tensor<8x32xf32>
  return %2 : tensor<8x32xf32>
}

// -----

// A free dim of the right factor is the last of the result.

// CHECK-LABEL: func.func @free_dim_of_the_right_factor
// CHECK:         %[[D:.*]] = stablehlo.dot_general %arg2, %arg0
// CHECK-NEXT:    %[[B:.*]] = stablehlo.broadcast_in_dim %arg1, dims = [1] : (tensor<64xf32>) -> tensor<8x64xf32>
// CHECK-NEXT:    stablehlo.multiply %[[D]], %[[B]]
func.func @free_dim_of_the_right_factor(%e: tensor<32x64xf32>, %r: tensor<64xf32>, %d: tensor<8x32xf32>) -> tensor<8x64xf32> {
  %0 = stablehlo.broadcast_in_dim %r, dims = [1] : (tensor<64xf32>) -> tensor<32x64xf32>
  %1 = stablehlo.multiply %e, %0 : tensor<32x64xf32>
  %2 = stablehlo.dot_general %d, %1, contracting_dims = [1] x [0] : (tensor<8x32xf32>, tensor<32x64xf32>) -> tensor<8x64xf32>
  return %2 : tensor<8x64xf32>
}

// -----

// What stays: a scale along free and contracted dims, a target that is no smaller, a factor that something else
// reads, a type that overflows early, and a scale by one number.

// CHECK-LABEL: func.func @both_kinds_of_dims
// CHECK:         %[[S:.*]] = stablehlo.multiply %arg0
// CHECK-NEXT:    stablehlo.dot_general %[[S]]
func.func @both_kinds_of_dims(%e: tensor<64x32x2xf32>, %r: tensor<64x32xf32>, %d: tensor<32x2x2xf32>) -> tensor<64x2xf32> {
  %0 = stablehlo.broadcast_in_dim %r, dims = [0, 1] : (tensor<64x32xf32>) -> tensor<64x32x2xf32>
  %1 = stablehlo.multiply %e, %0 : tensor<64x32x2xf32>
  %2 = stablehlo.dot_general %1, %d, contracting_dims = [1, 2] x [0, 1] : (tensor<64x32x2xf32>, tensor<32x2x2xf32>) -> tensor<64x2xf32>
  return %2 : tensor<64x2xf32>
}

// CHECK-LABEL: func.func @no_smaller_target
// CHECK:         %[[S:.*]] = stablehlo.multiply %arg0
// CHECK-NEXT:    stablehlo.dot_general %[[S]]
func.func @no_smaller_target(%e: tensor<64x32xf32>, %r: tensor<64xf32>, %d: tensor<32x32xf32>) -> tensor<64x32xf32> {
  %0 = stablehlo.broadcast_in_dim %r, dims = [0] : (tensor<64xf32>) -> tensor<64x32xf32>
  %1 = stablehlo.multiply %e, %0 : tensor<64x32xf32>
  %2 = stablehlo.dot_general %1, %d, contracting_dims = [1] x [0] : (tensor<64x32xf32>, tensor<32x32xf32>) -> tensor<64x32xf32>
  return %2 : tensor<64x32xf32>
}

// CHECK-LABEL: func.func @two_readers
// CHECK:         %[[S:.*]] = stablehlo.multiply %arg0
// CHECK-NEXT:    stablehlo.dot_general %[[S]]
func.func @two_readers(%e: tensor<64x32xf32>, %r: tensor<64xf32>, %d: tensor<32x8xf32>) -> (tensor<64x8xf32>, tensor<64x32xf32>) {
  %0 = stablehlo.broadcast_in_dim %r, dims = [0] : (tensor<64xf32>) -> tensor<64x32xf32>
  %1 = stablehlo.multiply %e, %0 : tensor<64x32xf32>
  %2 = stablehlo.dot_general %1, %d, contracting_dims = [1] x [0] : (tensor<64x32xf32>, tensor<32x8xf32>) -> tensor<64x8xf32>
  return %2, %1 : tensor<64x8xf32>, tensor<64x32xf32>
}

// CHECK-LABEL: func.func @narrow_range
// CHECK:         %[[S:.*]] = stablehlo.multiply %arg0
// CHECK-NEXT:    stablehlo.dot_general %[[S]]
func.func @narrow_range(%e: tensor<64x32xf16>, %r: tensor<64xf16>, %d: tensor<32x8xf16>) -> tensor<64x8xf16> {
  %0 = stablehlo.broadcast_in_dim %r, dims = [0] : (tensor<64xf16>) -> tensor<64x32xf16>
  %1 = stablehlo.multiply %e, %0 : tensor<64x32xf16>
  %2 = stablehlo.dot_general %1, %d, contracting_dims = [1] x [0] : (tensor<64x32xf16>, tensor<32x8xf16>) -> tensor<64x8xf16>
  return %2 : tensor<64x8xf16>
}

// CHECK-LABEL: func.func @one_number
// CHECK:         %[[S:.*]] = stablehlo.multiply %arg0
// CHECK-NEXT:    stablehlo.dot_general %[[S]]
func.func @one_number(%e: tensor<64x32xf32>, %r: tensor<f32>, %d: tensor<32x8xf32>) -> tensor<64x8xf32> {
  %0 = stablehlo.broadcast_in_dim %r, dims = [] : (tensor<f32>) -> tensor<64x32xf32>
  %1 = stablehlo.multiply %e, %0 : tensor<64x32xf32>
  %2 = stablehlo.dot_general %1, %d, contracting_dims = [1] x [0] : (tensor<64x32xf32>, tensor<32x8xf32>) -> tensor<64x8xf32>
  return %2 : tensor<64x8xf32>
}

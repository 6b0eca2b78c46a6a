// RUN: mpmd-opt %s -mpmd-copy-topology-from-main | FileCheck %s

// CHECK-LABEL: func.func public @step
func.func public @step(%a: tensor<4xf32>) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %0 = mpmd.call @micro(%a) : (tensor<4xf32>) -> tensor<4xf32>
  %1 = mpmd.for (%0) {iterations = 2 : ui32, unroll_factor = 1 : ui32} (%p: tensor<4xf32>, %i: tensor<ui32>) {
    %2 = mpmd.call @inner(%p) : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : tensor<4xf32>
  return %1 : tensor<4xf32>
}

// CHECK-LABEL: func.func private @micro
// CHECK-SAME: attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>}
func.func @micro(%a: tensor<4xf32>) -> tensor<4xf32> {
  return %a : tensor<4xf32>
}

// Calls in loops count.
// CHECK-LABEL: func.func private @inner
// CHECK-SAME: attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>}
func.func private @inner(%a: tensor<4xf32>) -> tensor<4xf32> {
  return %a : tensor<4xf32>
}

// Nothing calls it.
// CHECK: func.func @alone(%arg0: tensor<4xf32>) -> tensor<4xf32> {
func.func @alone(%a: tensor<4xf32>) -> tensor<4xf32> {
  return %a : tensor<4xf32>
}

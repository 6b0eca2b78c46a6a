// RUN: mpmd-opt %s -mpmd-forget-carried-starts -split-input-file | FileCheck %s

// The marked barriers go; a barrier without a mark is the user's and stays.

// CHECK-LABEL: func.func @main
// CHECK:         %[[C:.*]] = stablehlo.constant
// CHECK-NEXT:    %[[B:.*]] = stablehlo.optimization_barrier %[[C]] : tensor<4xf32>
// CHECK-NEXT:    mpmd.return %[[C]], %[[C]], %[[B]]
!t = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
func.func @main() -> (!t, !t, !t) attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %0:3 = mpmd.fragment<mesh="m1", origin=[]> () () {
    %c = stablehlo.constant dense<0.0> : tensor<4xf32>
    %p = stablehlo.optimization_barrier {mpmd.start = 0 : i64} %c : tensor<4xf32>
    %q = stablehlo.optimization_barrier {mpmd.start = 1 : i64} %c : tensor<4xf32>
    %r = stablehlo.optimization_barrier %c : tensor<4xf32>
    mpmd.return %p, %q, %r : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
  } : () -> (!t, !t, !t)
  return %0#0, %0#1, %0#2 : !t, !t, !t
}

// -----

// Start values that were never marked stay as they are.

// CHECK-LABEL: func.func @unmarked
// CHECK:         %[[C:.*]] = stablehlo.constant
// CHECK-NEXT:    mpmd.return %[[C]]
!t = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
func.func @unmarked() -> !t attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %0 = mpmd.fragment<mesh="m1", origin=[]> () () {
    %c = stablehlo.constant dense<0.0> : tensor<4xf32>
    mpmd.return %c : tensor<4xf32>
  } : () -> !t
  return %0 : !t
}

// RUN: mpmd-opt %s -mpmd-convert-sdy-constants | FileCheck %s

// In any function, however deep, with all attributes; other constants stay.

// CHECK-LABEL: func.func @main
// CHECK-NEXT:  %[[A:.*]] = stablehlo.constant {mark} dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT:  %[[B:.*]] = stablehlo.constant dense<2.000000e+00> : tensor<4xf32>
// CHECK:       stablehlo.if
// CHECK-NEXT:  stablehlo.constant dense<3.000000e+00>
// CHECK-NOT:   sdy.constant
func.func @main(%b: tensor<i1>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) {
  %0 = sdy.constant {mark} dense<1.0> : tensor<4xf32>
  %1 = stablehlo.constant dense<2.0> : tensor<4xf32>
  %2 = "stablehlo.if"(%b) ({
    %3 = sdy.constant dense<3.0> : tensor<4xf32>
    stablehlo.return %3 : tensor<4xf32>
  }, {
    stablehlo.return %0 : tensor<4xf32>
  }) : (tensor<i1>) -> tensor<4xf32>
  return %0, %1, %2 : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
}

// CHECK-LABEL: func.func @no_constant_of_sdy
// CHECK-NEXT:  %[[A:.*]] = stablehlo.constant {mark} dense<2.000000e+00> : tensor<4xf32>
// CHECK-NEXT:  return %[[A]]
func.func @no_constant_of_sdy() -> tensor<4xf32> {
  %0 = stablehlo.constant {mark} dense<2.0> : tensor<4xf32>
  return %0 : tensor<4xf32>
}

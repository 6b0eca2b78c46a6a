// RUN: mpmd-opt %s -mpmd-reshards-to-constraints | FileCheck %s

sdy.mesh @mesh = <["x"=2]>

// Constraints that were there stay, and reshards inside of regions turn too.

// CHECK-LABEL: func.func @main
// CHECK-NOT:   sdy.reshard
// CHECK:       %[[A:.*]] = sdy.sharding_constraint %arg0 <@mesh, [{"x"}]> : tensor<4xf32>
// CHECK:       stablehlo.if
// CHECK-NEXT:  sdy.sharding_constraint %[[A]] <@mesh, [{}]>
// CHECK-NOT:   sdy.reshard
func.func @main(%a: tensor<4xf32>, %b: tensor<i1>) -> tensor<4xf32> {
  %0 = sdy.reshard %a <@mesh, [{"x"}]> : tensor<4xf32>
  %1 = "stablehlo.if"(%b) ({
    %2 = sdy.reshard %0 <@mesh, [{}]> : tensor<4xf32>
    stablehlo.return %2 : tensor<4xf32>
  }, {
    stablehlo.return %0 : tensor<4xf32>
  }) : (tensor<i1>) -> tensor<4xf32>
  %3 = sdy.sharding_constraint %1 <@mesh, [{"x"}]> : tensor<4xf32>
  return %3 : tensor<4xf32>
}

// CHECK-LABEL: func.func @no_reshard
// CHECK-NEXT:  sdy.sharding_constraint %arg0 <@mesh, [{"x"}]> : tensor<4xf32>
func.func @no_reshard(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = sdy.sharding_constraint %a <@mesh, [{"x"}]> : tensor<4xf32>
  return %0 : tensor<4xf32>
}

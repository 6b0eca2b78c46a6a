// RUN: mpmd-opt %s -mpmd-inline-nested-user-exposed-ops='assignment=f@m1/0,g@m1/0,t@m1' | FileCheck %s

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func @names_in_names
func.func @names_in_names(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: mpmd.named_computation<"f"> (%arg0) (%arg1: tensor<4xf32>) {
  // CHECK-NEXT:   %[[X:.*]] = stablehlo.negate %arg1
  // CHECK-NEXT:   %[[Y:.*]] = stablehlo.tanh %[[X]]
  // CHECK-NEXT:   mpmd.return %[[Y]]
  %0 = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
    %1 = mpmd.named_computation<"unassigned"> (%p) (%q: tensor<4xf32>) {
      %2 = mpmd.named_computation<"g"> (%q) (%r: tensor<4xf32>) {
        %3 = stablehlo.negate %r : tensor<4xf32>
        mpmd.return %3 : tensor<4xf32>
      } : (tensor<4xf32>) -> tensor<4xf32>
      %4 = mpmd.named_tensor %2 name="t" : tensor<4xf32>
      mpmd.return %4 : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    %5 = mpmd.broadcast %1 : tensor<4xf32>
    %6 = stablehlo.tanh %5 : tensor<4xf32>
    mpmd.return %6 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// CHECK-LABEL: func @top_level_names_stay
func.func @top_level_names_stay(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: mpmd.named_tensor
  // CHECK-NEXT: mpmd.broadcast
  %0 = mpmd.named_tensor %a name="t" : tensor<4xf32>
  %1 = mpmd.broadcast %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}

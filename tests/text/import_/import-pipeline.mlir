// RUN: mpmd-opt %s -mpmd-import-pipeline='name-to-mesh-assignment=f@m1,g@m2' | FileCheck %s

// Of equal ops the first that is needed is kept, and stands where it stood: the iota above %f is not.

// CHECK-LABEL: func.func public @main
// CHECK-NEXT: %[[F:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) (%[[P:.*]]: tensor<4xf32>) {
// CHECK-NEXT:   %[[T:.*]] = stablehlo.tanh %[[P]]
// CHECK-NEXT:   %[[I:.*]] = stablehlo.iota
// CHECK-NEXT:   mpmd.return %[[T]], %[[I]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[F]]#0, %[[F]]#1
func.func public @main(%a: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  %0 = stablehlo.iota dim = 0 : tensor<4xf32>
  %1 = stablehlo.add %a, %0 : tensor<4xf32>
  %2 = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
    %4 = stablehlo.tanh %p : tensor<4xf32>
    mpmd.return %4 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %3 = stablehlo.iota dim = 0 : tensor<4xf32>
  return %2, %3 : tensor<4xf32>, tensor<4xf32>
}

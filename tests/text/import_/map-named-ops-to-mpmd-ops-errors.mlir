// RUN: mpmd-opt %s -mpmd-map-named-ops-to-mpmd-ops='assignment=f@m7' -verify-diagnostics

func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  // expected-error@+1 {{'f' is assigned to mesh "m7", which the topology lacks; its meshes are m1}}
  %0 = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  // expected-error@+1 {{Top-level NamedComputation 'g' is not assigned}}
  %1 = mpmd.named_computation<"g"> (%0) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

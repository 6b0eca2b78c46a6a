// RUN: mpmd-opt %s -mpmd-uniquify-function-inputs-outputs -verify-diagnostics

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// expected-error@+2 {{result 1 of @main is a tensor<4xf32>, on no mesh; every result needs a mesh before it can have a buffer of its own: assign it to one}}
func.func public @main(%a: !m1,
    %b: tensor<4xf32>) -> (!m1, tensor<4xf32>) attributes {topology = #topology} {
  return %a, %b : !m1, tensor<4xf32>
}

// RUN: mpmd-opt %s -mpmd-map-input-output-to-mesh='input-assignment=3@m1 output-assignment=0@m7' -verify-diagnostics

// expected-error@+2 {{argument 3 is assigned to m1, but the program has only 1 arguments}}
// expected-error@+1 {{result 0 is assigned to mesh "m7", which the topology lacks; its meshes are m1, m2}}
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  return %a : tensor<4xf32>
}

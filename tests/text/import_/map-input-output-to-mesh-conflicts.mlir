// RUN: mpmd-opt %s -mpmd-map-input-output-to-mesh='input-assignment=0@m1,0@m2,1@m1' -verify-diagnostics

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

// expected-error@+2 {{argument 0 is assigned to m1 and to m2; choose one}}
// expected-error@+1 {{argument 1 cannot be assigned to m1: it is not a plain tensor, but a !mpmd.mesh_tensor}}
func.func @main(%a: tensor<4xf32>, %b: !m2) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  return %a : tensor<4xf32>
}

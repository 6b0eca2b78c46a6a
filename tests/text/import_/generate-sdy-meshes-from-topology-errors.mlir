// RUN: mpmd-opt %s -mpmd-generate-sdy-meshes-from-topology -split-input-file -verify-diagnostics

sdy.mesh @all = <["a_x"=2, "b_x"=2]>
// expected-error@+1 {{it has axes of several meshes: a, b}}
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@all, [{"a_x", "b_x"}]>}) -> tensor<8xf32>
    attributes {topology = #mpmd.topology<<"a" : <["a_x"=2]>>, <"b" : <["b_x"=2]>>>} {
  return %x : tensor<8xf32>
}

// -----

sdy.mesh @all = <["x"=2]>
// expected-error@+1 {{axes x belong to no mesh of the topology: name them <mesh>_<axis>}}
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@all, [{"x"}]>}) -> tensor<8xf32>
    attributes {topology = #mpmd.topology<<"a" : <["a_x"=2]>>>} {
  return %x : tensor<8xf32>
}

// -----

sdy.mesh @a = <["a_x"=2]>
// expected-error@+1 {{mesh names of the topology are taken by meshes of shardings: a}}
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@a, [{"a_x"}]>}) -> tensor<8xf32>
    attributes {topology = #mpmd.topology<<"a" : <["a_x"=2]>>>} {
  return %x : tensor<8xf32>
}

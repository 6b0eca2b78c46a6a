// RUN: mpmd-opt %s -mpmd-propagate-shardings -verify-diagnostics

// Of several functions one must be the program.

sdy.mesh @mesh = <["x"=2]>
// expected-error@+1 {{shardings are propagated from the public function @main, which is none of @f, @g}}
func.func @f(%a: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<8x8xf32> {
  return %a : tensor<8x8xf32>
}
func.func @g(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {
  return %a : tensor<8x8xf32>
}

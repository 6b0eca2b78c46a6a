// RUN: mpmd-opt %s -mpmd-enforce-input-output-equisharding='constraints=0:7' -verify-diagnostics

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
// expected-error@+1 {{constraint 0:7: the program has 1 arguments and 1 results}}
func.func @main(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  return %a : !m1
}

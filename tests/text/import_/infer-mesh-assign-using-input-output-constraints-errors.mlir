// RUN: mpmd-opt %s -mpmd-infer-mesh-assign-using-input-output-constraints='constraints=0:0,0:3' -verify-diagnostics

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
// expected-error@+2 {{argument 0 is assigned to m1 and result 0 to m2, but they are to be on one mesh}}
// expected-error@+1 {{constraint 0:3: the program has 1 arguments and 1 results}}
func.func @main(%a: !m1) -> !m2 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  %0 = mpmd.transfer %a : (!m1) -> !m2
  return %0 : !m2
}

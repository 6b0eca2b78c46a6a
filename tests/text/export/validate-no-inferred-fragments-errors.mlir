// RUN: mpmd-opt %s -mpmd-validate-no-inferred-fragments='fail-on-inferred-fragments=false' -verify-diagnostics

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

func.func public @main(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  // expected-error@+1 {{Internal error: inferred fragment missing 'mpmd.inferred_by' attribute. It is on mesh "m1"}}
  %f = mpmd.fragment<mesh="m1", origin=[]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

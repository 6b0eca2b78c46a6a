// RUN: mpmd-opt %s -mpmd-validate-no-reshards -verify-diagnostics

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

func.func @moves(%p: tensor<4xf32>) -> tensor<4xf32> attributes {mesh_shape = #sdy.mesh<["x"=2]>} {
  return %p : tensor<4xf32>
}

func.func public @main(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  // expected-error@+1 {{Internal error: reshard-only fragment 'moves' is not an inferred fragment: it has the origins "f"(1)}}
  %0 = mpmd.fragment_call<mesh="m1", origin=["f"(1)]> @moves(%a) : (!m1) -> !m1
  return %0 : !m1
}

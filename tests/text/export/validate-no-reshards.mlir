// RUN: mpmd-opt %s -mpmd-validate-no-reshards -verify-diagnostics
// RUN: not mpmd-opt %s -mpmd-validate-no-reshards='fail-on-reshard-only-fragments=true' 2>&1 | FileCheck %s

// CHECK: error: Detected reshard-only fragment 'moves'

sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!s1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>

func.func @moves(%p: tensor<4xf32>, %q: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) attributes {mesh_shape = #sdy.mesh<["x"=2]>} {
  return %q, %p : tensor<4xf32>, tensor<4xf32>
}

func.func @computes(%p: tensor<4xf32>, %q: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) attributes {mesh_shape = #sdy.mesh<["x"=2]>} {
  %0 = stablehlo.add %p, %q : tensor<4xf32>
  return %q, %0 : tensor<4xf32>, tensor<4xf32>
}

func.func public @main(%a: !m1 loc("a"), %b: !s1 loc("b")) -> (!s1 {jax.result_info = "out[0]"}, !m1, !m1, !m1)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  // expected-warning@+1 {{Operands: Replicated <4xf32> loc("a"), #sdy.sharding<@mesh, [{"x"}]> <4xf32> loc("b"). Results: #sdy.sharding<@mesh, [{"x"}]> <4xf32> loc("out[0]"), Replicated}}
  %0:2 = mpmd.fragment_call<mesh="m1", origin=[]> @moves(%a, %b) : (!m1, !s1) -> (!s1, !m1)
  %1:2 = mpmd.fragment_call<mesh="m1", origin=[]> @computes(%a, %b) : (!m1, !s1) -> (!m1, !m1)
  return %0#0, %0#1, %1#0, %1#1 : !s1, !m1, !m1, !m1
}

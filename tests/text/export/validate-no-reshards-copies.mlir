// RUN: mpmd-opt %s -mpmd-validate-no-reshards=ignore-copies=true -verify-diagnostics

sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!s1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>

func.func @exchanges(%p: tensor<4xf32>, %q: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) attributes {mesh_shape = #sdy.mesh<["x"=2]>} {
  return %q, %p : tensor<4xf32>, tensor<4xf32>
}

func.func @reshards(%p: tensor<4xf32>, %q: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) attributes {mesh_shape = #sdy.mesh<["x"=2]>} {
  return %q, %q : tensor<4xf32>, tensor<4xf32>
}

func.func public @main(%a: !m1, %b: !s1) -> (!s1, !m1, !s1, !m1) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %0:2 = mpmd.fragment_call<mesh="m1", origin=[]> @exchanges(%a, %b) : (!m1, !s1) -> (!s1, !m1)
  // expected-warning@+1 {{Detected reshard-only fragment 'reshards'}}
  %1:2 = mpmd.fragment_call<mesh="m1", origin=[]> @reshards(%a, %b) : (!m1, !s1) -> (!s1, !m1)
  return %0#0, %0#1, %1#0, %1#1 : !s1, !m1, !s1, !m1
}

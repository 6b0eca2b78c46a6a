// RUN: mpmd-opt %s -mpmd-sink-create-token-into-fragments -split-input-file -verify-diagnostics | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!token = !stablehlo.token
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// The token goes from f to g and out; what is left are tokens of each fragment's own, and the argument.

// CHECK-LABEL: func.func public @threaded
// CHECK-NEXT:  %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) {arg_attrs = [{a}], res_attrs = [{r}]}
// CHECK-NEXT:    %[[T:.*]] = stablehlo.create_token
// CHECK-NEXT:    %[[S:.*]] = "stablehlo.send"(%{{.*}}, %[[T]])
// CHECK-NEXT:    mpmd.return %{{[^,]*}} : tensor<4xf32>
// CHECK:       mpmd.fragment<mesh="m1", origin=["g"]> (%[[F]])
// CHECK-NEXT:    stablehlo.create_token
// CHECK:       return %{{.*}}, %arg1
func.func public @threaded(%a: !m1, %k: !token) -> (!m1, !token) attributes {topology = #topology} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%k, %a) {arg_attrs = [{k}, {a}], res_attrs = [{t}, {r}]} (%q: !token, %p: tensor<4xf32>) {
    %1 = "stablehlo.send"(%p, %q) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 2>, is_host_transfer = true}> : (tensor<4xf32>, !token) -> !token
    mpmd.return %1, %p : !token, tensor<4xf32>
  } : (!token, !m1) -> (!token, !m1)
  %g:2 = mpmd.fragment<mesh="m1", origin=["g"]> (%f#1, %f#0) (%p: tensor<4xf32>, %q: !token) {
    %1 = "stablehlo.send"(%p, %q) <{channel_handle = #stablehlo.channel_handle<handle = 3, type = 2>, is_host_transfer = true}> : (tensor<4xf32>, !token) -> !token
    mpmd.return %p, %1 : tensor<4xf32>, !token
  } : (!m1, !token) -> (!m1, !token)
  return %g#0, %g#1 : !m1, !token
}

// CHECK-LABEL: func.func public @nothing_to_do
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["f"]> (%arg0)
// CHECK-NEXT:    mpmd.return
func.func public @nothing_to_do(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

func.func public @out_of_nothing(%a: !m1) -> (!m1, !stablehlo.token) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  // expected-error@+1 {{the function returns a token that a fragment creates}}
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.create_token : !stablehlo.token
    mpmd.return %p, %0 : tensor<4xf32>, !stablehlo.token
  } : (!m1) -> (!m1, !stablehlo.token)
  return %f#0, %f#1 : !m1, !stablehlo.token
}

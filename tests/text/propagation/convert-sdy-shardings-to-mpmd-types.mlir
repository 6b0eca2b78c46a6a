// RUN: mpmd-opt %s -mpmd-convert-sdy-shardings-to-mpmd-types -split-input-file -verify-diagnostics | FileCheck %s

sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>, memory_kind="pinned_host">
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// Memory kinds and other attributes stay; tokens have no sharding.

// CHECK-LABEL: func.func @main
// CHECK-SAME:  %arg0: !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>> {jax.buffer_donor = true}, %arg1: !stablehlo.token
// CHECK-SAME:  -> (!mpmd.mesh_tensor<"m2", tensor<4xf32>, sharding=<@mesh, [{"x"}]>, memory_kind="pinned_host"> {jax.result_info = "r"}
// CHECK-NOT:   sdy.sharding =
// CHECK:       mpmd.fragment<mesh="m1", origin=["f"]> (%arg0, %arg1)
// CHECK:       stablehlo.send
// CHECK-SAME:  sdy.sharding
// CHECK:       } : (!mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>, !stablehlo.token) -> !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>
// CHECK:       mpmd.transfer %0 :
func.func @main(%a: !m1 {jax.buffer_donor = true, sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %k: !stablehlo.token)
    -> (!m2 {jax.result_info = "r", sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], in_shardings=[<@mesh, [{"x"}]>, <@mesh, []>], out_shardings=[<@mesh, [{"x"}]>]> (%a, %k) (%p: tensor<4xf32>, %q: !stablehlo.token) {
    %0 = stablehlo.negate %p {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} : tensor<4xf32>
    %1 = "stablehlo.send"(%0, %q) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 2>, is_host_transfer = true}> {sdy.sharding = #sdy.sharding_per_value<[<@mesh, []>]>} : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token
    mpmd.return %0 : tensor<4xf32>
  } : (!m1, !stablehlo.token) -> !m1
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} %f : (!m1) -> !m2
  return %t : !m2
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func @nothing_to_do(%arg0: !mpmd.mesh_tensor<"m1", tensor<4xf32>>) -> !mpmd.mesh_tensor<"m1", tensor<4xf32>>
func.func @nothing_to_do(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  return %a : !m1
}

// -----

sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

// The module is printed all the same.

// CHECK-LABEL: func.func @changes_on_the_way
func.func @changes_on_the_way(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> !m2 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  // expected-error@+1 {{Transfer op has different shardings for the tensor and result, tensor sharding: #sdy.sharding<@mesh, [{"x"}]>, result sharding: #sdy.sharding<@mesh, [{}]>}}
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}]>]>} %a : (!m1) -> !m2
  return %t : !m2
}

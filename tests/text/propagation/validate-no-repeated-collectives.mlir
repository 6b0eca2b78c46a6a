// RUN: mpmd-opt %s -mpmd-validate-no-repeated-collectives='reductions=true gathers=true' -split-input-file -verify-diagnostics | FileCheck %s

// A gradient that is clipped in each microbatch is added over the devices there.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>, sharding=<@mesh, [{"data"}, {}]>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>, sharding=<@mesh, [{}, {}]>>

// CHECK-LABEL: func.func public @clipped
func.func public @clipped(%x0: !x, %x1: !x, %w: !w) -> (!w {jax.result_info = "result['w']"}) attributes {topology = #mpmd.topology<<"m1" : <["data"=2]>>>} {
  %z = mpmd.fragment<mesh="m1", origin=[]> () () {
    %0 = stablehlo.constant dense<0.0> : tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : () -> !w
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %z) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.sign %0 : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    // expected-warning@+1 {{reduce_gradients is once, but devices add up terms of result['w'] over 'data' in each microbatch, in 'f' on mesh 'm1': sign}}
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.sign %0 : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %u = mpmd.fragment<mesh="m1", origin=[]> (%b1, %w) (%p: tensor<4x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.subtract %q, %p : tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!w, !w) -> !w
  return %u : !w
}

// -----

// A sum over the devices that stays in its microbatch is none of gradients; nor is one over no devices.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>, sharding=<@mesh, [{"data"}, {}]>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>, sharding=<@mesh, [{}, {}]>>

// CHECK-LABEL: func.func public @normalized
func.func public @normalized(%x0: !x, %x1: !x) -> (!x, !x, !w, !w) attributes {topology = #mpmd.topology<<"m1" : <["data"=2]>>>} {
  %b0, %c0 = mpmd.fragment<mesh="m1", origin=["f"]> (%x0) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.dot_general %p, %0, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %0 : tensor<8x4xf32>, tensor<4x4xf32>
  } : (!x) -> (!x, !w)
  %b1, %c1 = mpmd.fragment<mesh="m1", origin=["f"]> (%x1) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.dot_general %p, %0, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %0 : tensor<8x4xf32>, tensor<4x4xf32>
  } : (!x) -> (!x, !w)
  return %b0, %b1, %c0, %c1 : !x, !x, !w, !w
}

// -----

// Each device scatters its own rows into its own table: nothing is added over devices.

sdy.mesh @mesh = <["data"=2]>
!u = !mpmd.mesh_tensor<"m1", tensor<2x4x4xf32>, sharding=<@mesh, [{"data"}, {}, {}]>>
!i = !mpmd.mesh_tensor<"m1", tensor<2x4x1xi32>, sharding=<@mesh, [{"data"}, {}, {}]>>
!t = !mpmd.mesh_tensor<"m1", tensor<2x6x4xf32>, sharding=<@mesh, [{"data"}, {}, {}]>>

// CHECK-LABEL: func.func public @table_of_each_device
func.func public @table_of_each_device(%x0: !u, %i0: !i, %x1: !u, %i1: !i, %z: !t) -> !t attributes {topology = #mpmd.topology<<"m1" : <["data"=2]>>>} {
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %i0, %z) {call_counter = 0 : ui32} (%u: tensor<2x4x4xf32>, %i: tensor<2x4x1xi32>, %q: tensor<2x6x4xf32>) {
    %0 = stablehlo.constant dense<0.0> : tensor<2x6x4xf32>
    %1 = "stablehlo.scatter"(%0, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [2], inserted_window_dims = [1], input_batching_dims = [0], scatter_indices_batching_dims = [0], scatter_dims_to_operand_dims = [1], index_vector_dim = 2>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<2x6x4xf32>, tensor<2x4x1xi32>, tensor<2x4x4xf32>) -> tensor<2x6x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<2x6x4xf32>
    mpmd.return %2 : tensor<2x6x4xf32>
  } : (!u, !i, !t) -> !t
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %i1, %b0) {call_counter = 1 : ui32} (%u: tensor<2x4x4xf32>, %i: tensor<2x4x1xi32>, %q: tensor<2x6x4xf32>) {
    %0 = stablehlo.constant dense<0.0> : tensor<2x6x4xf32>
    %1 = "stablehlo.scatter"(%0, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [2], inserted_window_dims = [1], input_batching_dims = [0], scatter_indices_batching_dims = [0], scatter_dims_to_operand_dims = [1], index_vector_dim = 2>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<2x6x4xf32>, tensor<2x4x1xi32>, tensor<2x4x4xf32>) -> tensor<2x6x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<2x6x4xf32>
    mpmd.return %2 : tensor<2x6x4xf32>
  } : (!u, !i, !t) -> !t
  return %b1 : !t
}

// -----

// A weight of which one reader takes its parts, and another all of it.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>, sharding=<@mesh, [{"data"}, {}]>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>, sharding=<@mesh, [{"data"}, {}]>>

// CHECK-LABEL: func.func public @parts_and_whole
func.func public @parts_and_whole(%w: !w, %x0: !x, %x1: !x) -> (!x, !w, !x, !w) attributes {topology = #mpmd.topology<<"m1" : <["data"=2]>>>} {
  %b0, %c0 = mpmd.fragment<mesh="m1", origin=["f"]> (%x0, %w) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.tanh %q : tensor<4x4xf32>
    mpmd.return %0, %1 : tensor<8x4xf32>, tensor<4x4xf32>
  } : (!x, !w) -> (!x, !w)
  %b1, %c1 = mpmd.fragment<mesh="m1", origin=["f"]> (%x1, %w) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    // expected-warning@+1 {{gather_weights is once, but devices gather a weight of type tensor<4x4xf32> over 'data' in each microbatch, in 'f' on mesh 'm1': tanh}}
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.tanh %q : tensor<4x4xf32>
    mpmd.return %0, %1 : tensor<8x4xf32>, tensor<4x4xf32>
  } : (!x, !w) -> (!x, !w)
  return %b0, %c0, %b1, %c1 : !x, !w, !x, !w
}

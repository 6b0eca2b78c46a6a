// RUN: mpmd-opt %s -mpmd-mark-aliasing-and-donation=keep-microbatches-equal=true -split-input-file \
// RUN:   | FileCheck %s

// Only the second fragment uses %w for the last time: both keep it, so that they stay one program.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @equal
// CHECK: mpmd.fragment<mesh="m1", origin=["f"]> (%[[A:.*]], %[[W:.*]]) {arg_attrs = [{tf.aliasing_output = 0 : i32}, {}], call_counter = 0 : ui32}
// CHECK: mpmd.fragment<mesh="m1", origin=["f"]> (%{{.*}}, %[[W]]) {arg_attrs = [{tf.aliasing_output = 0 : i32}, {}], call_counter = 1 : ui32}
func.func public @equal(%a: !m1 {jax.buffer_donor = true}, %w: !m1 {jax.buffer_donor = true}) -> !m1
    attributes {topology = #topology} {
  %0 = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %w) {call_counter = 0 : ui32} (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  %1 = mpmd.fragment<mesh="m1", origin=["f"]> (%0, %w) {call_counter = 1 : ui32} (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %1 : !m1
}

// -----

// An argument that the user gave away takes a result of its type; one that the user keeps does not.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @update
// CHECK: mpmd.fragment<mesh="m1", origin=["f"]> (%{{.*}}, %{{.*}}) {arg_attrs = [{tf.aliasing_output = 0 : i32}, {}]}
func.func public @update(%a: !m1 {jax.buffer_donor = true}, %b: !m1) -> !m1 attributes {topology = #topology} {
  %0 = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b) (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %0 : !m1
}

// RUN: mpmd-opt %s -mpmd-mark-aliasing-and-donation | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!h1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="pinned_host">
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// Arguments only if donated, and aliased only as the user says; values in between always; never what some
// transfer reads (t reads h), nor what is read later, nor what lives on the host. A value that is given twice
// is free with its last position.

// CHECK-LABEL: func.func public @main
// CHECK:       origin=["f"]> (%arg0, %arg1, %arg2) {arg_attrs = [{jax.buffer_donor = true}, {}, {}]}
// CHECK:       origin=["h"]> ({{.*}}) {arg_attrs = [{}, {tf.aliasing_output = 0 : i32}, {jax.buffer_donor = true}]}
// CHECK-NOT:   arg_attrs
func.func public @main(%a: !m1 {jax.buffer_donor = true}, %b: !m1, %c: !h1 {jax.buffer_donor = true})
    -> (!m2, !m1) attributes {topology = #topology} {
  %f, %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b, %c) (%p: tensor<4xf32>, %q: tensor<4xf32>, %r: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %0, %q : tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1, !h1) -> (!m1, !m1)
  %h = mpmd.fragment<mesh="m1", origin=["h"]> (%f, %f, %g) (%p: tensor<4xf32>, %q: tensor<4xf32>, %r: tensor<4xf32>) {
    %0 = stablehlo.multiply %p, %r : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1, !m1, !m1) -> !m1
  %t = mpmd.transfer %h : (!m1) -> !m2
  %k = mpmd.fragment<mesh="m1", origin=["k"]> (%h, %b) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %t, %k : !m2, !m1
}

// The wish of %a is another fragment's result, that of %b a result of k, seen through a transfer to the same
// place; %c wishes for what does not exist and takes the first result that is left.

// CHECK-LABEL: func.func public @wishes
// CHECK:       origin=["f"]> (%arg0) {arg_attrs = [{tf.aliasing_output = 0 : i32}]}
// CHECK:       origin=["k"]> (%{{.*}}, %arg1, %arg2) {arg_attrs = [{}, {tf.aliasing_output = 1 : i32}, {tf.aliasing_output = 0 : i32}]}
func.func public @wishes(%a: !m1 {tf.aliasing_output = 0 : i32}, %b: !m1 {tf.aliasing_output = 1 : i32}, %c: !m1 {tf.aliasing_output = 7 : i32})
    -> (!m1, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %k:2 = mpmd.fragment<mesh="m1", origin=["k"]> (%f, %b, %c) (%p: tensor<4xf32>, %q: tensor<4xf32>, %r: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    %1 = stablehlo.add %p, %r : tensor<4xf32>
    mpmd.return %0, %1 : tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1, !m1) -> (!m1, !m1)
  %t = mpmd.transfer %k#1 : (!m1) -> !m1
  return %f, %t, %k#0 : !m1, !m1, !m1
}

// An argument that is not donated, and a value that is returned.

// CHECK-LABEL: func.func public @nothing_is_free
// CHECK-NOT:   arg_attrs
func.func public @nothing_is_free(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g : !m1, !m1
}

// A result of another shape cannot take over the memory of an operand: the second one does.

// CHECK-LABEL: func.func public @of_one_shape
// CHECK:       origin=["g"]> (%0) {arg_attrs = [{tf.aliasing_output = 1 : i32}]}
func.func public @of_one_shape(%a: !m1) -> (!mpmd.mesh_tensor<"m1", tensor<2xf32>>, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %g:2 = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%p: tensor<4xf32>) {
    %0 = stablehlo.slice %p [0:2] : (tensor<4xf32>) -> tensor<2xf32>
    %1 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0, %1 : tensor<2xf32>, tensor<4xf32>
  } : (!m1) -> (!mpmd.mesh_tensor<"m1", tensor<2xf32>>, !m1)
  return %g#0, %g#1 : !mpmd.mesh_tensor<"m1", tensor<2xf32>>, !m1
}

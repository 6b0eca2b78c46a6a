// RUN: mpmd-opt %s -mpmd-remat-fragment -split-input-file | FileCheck %s --check-prefixes=CHECK,CLONE
// RUN: mpmd-opt %s -mpmd-remat-fragment='merge-remat-fragments=true' -split-input-file | FileCheck %s --check-prefixes=CHECK,MERGE

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// Both results that the backward needs come from one clone; the residual lives on for the other reader.

// CHECK-LABEL: func.func public @recomputed
// CHECK:       %[[F:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) {call_counter = 0 : ui32}
// CHECK:       %[[K:.*]] = mpmd.fragment<mesh="m1", origin=["k"]>
// CLONE:       %[[R:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) {call_counter = 0 : ui32, remat}
// CLONE:       mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[R]]#0, %[[R]]#1, %[[K]])
// MERGE:       mpmd.fragment<mesh="m1", origin=["f", "f"(1)]> (%arg0, %[[K]]) {call_counter = 0 : ui32, remat}
// MERGE-NEXT:  stablehlo.negate
// MERGE-NEXT:  stablehlo.add
// CHECK:       origin=["last"]> (%[[F]]#0)
func.func public @recomputed(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0, %p : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!m1, !m1)
  %k = mpmd.fragment<mesh="m1", origin=["k"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %b = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f#0, %f#1, %k) {call_counter = 0 : ui32} (%p: tensor<4xf32>, %q: tensor<4xf32>, %r: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1, !m1, !m1) -> !m1
  %l = mpmd.fragment<mesh="m1", origin=["last"]> (%f#0) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %b, %l : !m1, !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// Not for the backward that stands next, nor for another microbatch, nor for another stage.

// CHECK-LABEL: func.func public @as_it_was
// CHECK-NOT:   remat
func.func public @as_it_was(%a: !m1) -> (!m1, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %b = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=0> (%f) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %c = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=0> (%f) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %d = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=1> (%f) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %b, %c, %d : !m1, !m1, !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// What calls back to Python, or draws without a key, is done once; what the devices of a mesh do together, and
// what only says where a value is to be, may be done again.

// CHECK-LABEL: func.func public @effects
// CHECK:       custom_call @draw
// CHECK-NOT:   custom_call @draw
// CHECK:       stablehlo.rng
// CHECK-NOT:   {{custom_call @draw|stablehlo.rng}}
// CHECK:       stablehlo.all_reduce
// CHECK-NOT:   {{custom_call @draw|stablehlo.rng}}
// CHECK:       stablehlo.all_reduce
// CHECK-NOT:   {{custom_call @draw|stablehlo.rng}}
// CHECK:       {{^ *return}}
func.func public @effects(%a: !m1, %low: !mpmd.mesh_tensor<"m1", tensor<f32>>) -> (!m1, !m1, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @draw(%p) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%low) {call_counter = 0 : ui32} (%p: tensor<f32>) {
    %shape = stablehlo.constant dense<4> : tensor<1xi64>
    %0 = stablehlo.rng %p, %p, %shape, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!mpmd.mesh_tensor<"m1", tensor<f32>>) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["h"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    %0 = "stablehlo.all_reduce"(%p) <{replica_groups = dense<0> : tensor<1x1xi64>}> ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %2 = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }) : (tensor<4xf32>) -> tensor<4xf32>
    %1 = stablehlo.custom_call @annotate_device_placement(%0) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["k"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %b = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f, %k) {call_counter = 0 : ui32} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  %c = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%g, %k) {call_counter = 0 : ui32} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  %d = mpmd.fragment<mesh="m1", origin=["h"(1)]> (%h, %k) {call_counter = 0 : ui32} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %b, %c, %d, %k : !m1, !m1, !m1, !m1
}

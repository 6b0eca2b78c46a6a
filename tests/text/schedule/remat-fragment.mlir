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

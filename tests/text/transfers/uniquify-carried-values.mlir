// RUN: mpmd-opt %s -mpmd-uniquify-carried-values -cse -mpmd-fragment-dedup -mpmd-fragment-dce -split-input-file | FileCheck %s

// Two accumulators begin with one value: each gets a copy, which neither cse nor dedup joins again.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @two_accumulators
// CHECK:         %[[Z:.*]]:2 = mpmd.fragment<mesh="m1", origin=[]> ()
// CHECK:           %[[C:.*]] = stablehlo.constant
// CHECK:           %[[P:.*]] = stablehlo.optimization_barrier {mpmd.start = 0 : i64} %[[C]]
// CHECK:           %[[Q:.*]] = stablehlo.optimization_barrier {mpmd.start = 1 : i64} %[[C]]
// CHECK:           mpmd.return %[[P]], %[[Q]]
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[Z]]#0, %[[Z]]#1) {call_counter = 0 : ui32}
func.func public @two_accumulators() -> (!m1, !m1) attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %z = mpmd.fragment<mesh="m1", origin=[]> () () {
    %c = stablehlo.constant dense<0.0> : tensor<4xf32>
    mpmd.return %c : tensor<4xf32>
  } : () -> !m1
  %a:2 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%z, %z) {call_counter = 0 : ui32} (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %0 = stablehlo.negate %x : tensor<4xf32>
    %1 = stablehlo.abs %y : tensor<4xf32>
    mpmd.return %0, %1 : tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1) -> (!m1, !m1)
  %b:2 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a#0, %a#1) {call_counter = 1 : ui32} (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %0 = stablehlo.negate %x : tensor<4xf32>
    %1 = stablehlo.abs %y : tensor<4xf32>
    mpmd.return %0, %1 : tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1) -> (!m1, !m1)
  return %b#0, %b#1 : !m1, !m1
}

// -----

// A start value that nothing else reads is left alone.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @its_own
// CHECK-NOT:     optimization_barrier
func.func public @its_own() -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %z = mpmd.fragment<mesh="m1", origin=[]> () () {
    %c = stablehlo.constant dense<0.0> : tensor<4xf32>
    mpmd.return %c : tensor<4xf32>
  } : () -> !m1
  %a = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%z) {call_counter = 0 : ui32} (%x: tensor<4xf32>) {
    %0 = stablehlo.negate %x : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %b = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a) {call_counter = 1 : ui32} (%x: tensor<4xf32>) {
    %0 = stablehlo.negate %x : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  return %b : !m1
}

// RUN: mpmd-opt %s -mpmd-copy-cheap-constants -mpmd-fragment-dce -split-input-file | FileCheck %s
// RUN: mpmd-opt %s -mpmd-copy-cheap-constants='max-ops=1' -split-input-file | FileCheck %s --check-prefix=ONE

// Zeros that a microbatch and the work behind it read are made twice, so that they need not be kept.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @zeros
// CHECK:         %[[Z:.*]] = mpmd.fragment<mesh="m1", origin=[]> ()
// CHECK:         %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[Z]])
// CHECK:         mpmd.fragment<mesh="m1", origin=[]> (%[[F]])
// CHECK-NEXT:      %[[C:.*]] = stablehlo.constant
// CHECK-NEXT:      %[[B:.*]] = stablehlo.broadcast_in_dim %[[C]]
// CHECK-NEXT:      stablehlo.add %{{.*}}, %[[B]]
// ONE-LABEL: func.func public @zeros
// ONE: mpmd.fragment<mesh="m1", origin=[]> (%{{.*}}, %{{.*}})
// ONE-NEXT: stablehlo.add
func.func public @zeros() -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %z = mpmd.fragment<mesh="m1", origin=[]> () () {
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %b = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<4xf32>
    mpmd.return %b : tensor<4xf32>
  } : () -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%z) {call_counter = 0 : ui32} (%a: tensor<4xf32>) {
    %0 = stablehlo.negate %a : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %u = mpmd.fragment<mesh="m1", origin=[]> (%f, %z) (%a: tensor<4xf32>, %b: tensor<4xf32>) {
    %0 = stablehlo.add %a, %b : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %u : !m1
}

// -----

// What depends on an argument is not constant, and a microbatch's fragment is left as it is.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @not_constant
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"]> (%{{.*}})
// CHECK-NEXT:      stablehlo.negate
// CHECK:         mpmd.fragment<mesh="m1", origin=[]> (%{{.*}}, %{{.*}})
// CHECK-NEXT:      stablehlo.add
func.func public @not_constant(%x: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %z = mpmd.fragment<mesh="m1", origin=[]> (%x) (%a: tensor<4xf32>) {
    %0 = stablehlo.abs %a : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%z) {call_counter = 0 : ui32} (%a: tensor<4xf32>) {
    %0 = stablehlo.negate %a : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %u = mpmd.fragment<mesh="m1", origin=[]> (%f, %z) (%a: tensor<4xf32>, %b: tensor<4xf32>) {
    %0 = stablehlo.add %a, %b : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %u : !m1
}

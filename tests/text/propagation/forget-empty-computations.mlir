// RUN: mpmd-opt %s -mpmd-forget-empty-computations | FileCheck %s

sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!s1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>

// CHECK-LABEL: func.func @main
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=[]> (%arg0) {call_counter = 0 : ui32, mpmd.inferred_by = ["extract_reshards"]}
// CHECK:       mpmd.fragment<mesh="m1", origin=["g"], stage=1>
// CHECK:       mpmd.fragment<mesh="m1", origin=[]> (%arg0) {mpmd.inferred_by = ["other"]}
func.func @main(%a: !m1) -> (!s1, !s1, !s1) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=0> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !s1
  %g = mpmd.fragment<mesh="m1", origin=["g"], stage=1> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !s1
  %h = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["other"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !s1
  return %f, %g, %h : !s1, !s1, !s1
}

// One result is computed: it keeps its name.

// CHECK-LABEL: func.func @computes_something
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%arg0)
func.func @computes_something(%a: !m1) -> (!s1, !s1) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %p, %0 : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!s1, !s1)
  return %f#0, %f#1 : !s1, !s1
}

// It returns its argument, and calls back: it keeps its name.

// CHECK-LABEL: func.func @has_an_effect
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%arg0)
func.func @has_an_effect(%a: !m1) -> !s1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) (%p: tensor<4xf32>) {
    stablehlo.custom_call @f(%p) {has_side_effect = true} : (tensor<4xf32>) -> ()
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !s1
  return %f : !s1
}

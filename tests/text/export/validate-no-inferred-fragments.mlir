// RUN: mpmd-opt %s -mpmd-validate-no-inferred-fragments -split-input-file -verify-diagnostics
// RUN: mpmd-opt %s -mpmd-validate-no-inferred-fragments='fail-on-inferred-fragments=false' -split-input-file 2>&1 | FileCheck %s

// CHECK: warning: Inferred fragment has not been merged (inferred by split)

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

func.func public @main(%a: !m1) -> (!m1, !m1, !m1) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  // expected-warning@+1 {{Inferred fragment has not been merged (inferred by split, uniquify)}}
  %g = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["split", "uniquify"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  // expected-error@+1 {{Inferred fragment has not been merged (inferred by split)}}
  %h = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["split"]} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g, %h : !m1, !m1, !m1
}

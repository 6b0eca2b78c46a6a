// RUN: mpmd-opt %s -mpmd-order-by-tasks='orders=m1:0B0,0F0 fail-on-impossible-order=false' -verify-diagnostics
// RUN: mpmd-opt %s -mpmd-order-by-tasks='orders=m1:0B0,0F0 fail-on-impossible-order=false' | FileCheck %s

// The program keeps its order, and a warning says why.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK: mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK: mpmd.fragment<mesh="m1", origin=["f"(1)]>
func.func public @main(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  // expected-warning@+1 {{All tasks run in that order as far as the data flow allows}}
  %g = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

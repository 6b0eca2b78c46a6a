// RUN: mpmd-opt %s -mpmd-order-by-tasks='orders=m1:0B0,0F0' -verify-diagnostics
// RUN: not mpmd-opt %s -mpmd-order-by-tasks='orders=m1:0B0,0F0' 2>&1 | FileCheck %s
// RUN: not mpmd-opt %s -mpmd-order-by-tasks='orders=m7:0F0' 2>&1 | FileCheck %s --check-prefix=MESH
// RUN: not mpmd-opt %s -mpmd-order-by-tasks='orders=m1:0F0,0X1' 2>&1 | FileCheck %s --check-prefix=TEXT
// RUN: not mpmd-opt %s -mpmd-order-by-tasks='orders=m1:0F0,0F0' 2>&1 | FileCheck %s --check-prefix=TWICE

// CHECK: task 0B0 of mesh "m1" can never run, as it waits for itself
// CHECK: 0B0 (fragment "f"(1) on mesh "m1", microbatch 0)
// CHECK-NEXT: reads a result of 0F0 (fragment "f" on mesh "m1", microbatch 0)
// CHECK: comes in the order after 0B0
// MESH: the order is for mesh 'm7'; the topology has m1
// TEXT: '0X1' is not a task
// TWICE: task 0F0 occurs twice

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

func.func public @main(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  // expected-error@+1 {{the order is impossible: task 0B0 of mesh "m1" can never run}}
  %g = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

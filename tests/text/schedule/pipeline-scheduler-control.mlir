// RUN: mpmd-opt %s -mpmd-pipeline-scheduler='must-happen-before=gpipe remove-control-dependencies=false' | FileCheck %s

// What the schedule asks for stays: each fragment names all that must run before it and that it does not
// follow anyhow.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: sym_name = "main"
// CHECK:      %[[F:[^ ]*]] = "mpmd.fragment"(%arg0)
// CHECK:      }) {call_counter = 0 : ui32}
// CHECK-NEXT: %[[G:[^ ]*]] = "mpmd.fragment"(%arg0, %[[F]])
// CHECK:      }) {call_counter = 1 : ui32, mpmd.control_operand_start_idx = 1 : i64}
// CHECK-NEXT: %[[H:[^ ]*]] = "mpmd.fragment"(%arg0, %[[F]], %[[G]])
// CHECK:      }) {call_counter = 2 : ui32, mpmd.control_operand_start_idx = 1 : i64}
func.func public @main(%a: !m1) -> (!m1, !m1, !m1) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %h = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 2 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g, %h : !m1, !m1, !m1
}

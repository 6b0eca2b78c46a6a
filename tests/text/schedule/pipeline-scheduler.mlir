// RUN: mpmd-opt %s -mpmd-pipeline-scheduler='must-happen-before=1F1B' -split-input-file | FileCheck %s --check-prefixes=CHECK,ONE
// RUN: mpmd-opt %s -mpmd-pipeline-scheduler='must-happen-before=gpipe' -split-input-file | FileCheck %s --check-prefixes=CHECK,GPIPE
// RUN: mpmd-opt %s -mpmd-pipeline-scheduler='must-happen-before=none' -split-input-file | FileCheck %s --check-prefixes=CHECK,NONE

// On the last of two meshes 1F1B alternates at once; GPipe runs all forwards first; names count in any case.
// What is no scheduling unit (w has no microbatch) stays in front.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func.func public @last_mesh
// CHECK:       origin=["w"]>
// ONE:         origin=["f"]> {{.*}}call_counter = 0
// ONE:         origin=["f"(1)]> {{.*}}call_counter = 0
// ONE:         origin=["f"]> {{.*}}call_counter = 1
// ONE:         origin=["f"(1)]> {{.*}}call_counter = 1
// GPIPE:       origin=["f"]> {{.*}}call_counter = 0
// GPIPE:       origin=["f"]> {{.*}}call_counter = 1
// GPIPE:       origin=["f"(1)]> {{.*}}call_counter = 0
// GPIPE:       origin=["f"(1)]> {{.*}}call_counter = 1
// NONE:        origin=["f"(1)]> {{.*}}call_counter = 1
// NONE:        origin=["f"(1)]> {{.*}}call_counter = 0
// NONE:        origin=["f"]> {{.*}}call_counter = 1
// NONE:        origin=["f"]> {{.*}}call_counter = 0
// CHECK-NOT:   control
func.func public @last_mesh(%a: !m2) -> (!m2, !m2, !m2, !m2, !m2) attributes {topology = #topology} {
  %w = mpmd.fragment<mesh="m2", origin=["w"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %b1 = mpmd.fragment<mesh="m2", origin=["f"(1)]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %b0 = mpmd.fragment<mesh="m2", origin=["f"(1)]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %f1 = mpmd.fragment<mesh="m2", origin=["f"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %f0 = mpmd.fragment<mesh="m2", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  return %w, %b1, %b0, %f1, %f0 : !m2, !m2, !m2, !m2, !m2
}

// -----

// The schedule never goes against data flow: here a forward needs a backward of an earlier microbatch.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @data_flow_wins
// CHECK:       %[[B0:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]> {{.*}}call_counter = 0
// CHECK:       mpmd.fragment<mesh="m1", origin=["f"]> (%[[B0]]) {call_counter = 1
func.func public @data_flow_wins(%a: !m1) -> !m1 attributes {topology = #topology} {
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%b0) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f1 : !m1
}

// -----

// Callees and functions without a topology are as they were.

// CHECK-LABEL: func.func @plain
// CHECK-NEXT:  stablehlo.negate
func.func @plain(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}

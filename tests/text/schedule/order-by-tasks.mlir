// RUN: mpmd-opt %s -mpmd-order-by-tasks='orders=m1:0F0,0B0,0F1,0B1;m2:1F1,1F0,1I0,1W0' | FileCheck %s --check-prefix=ONE
// RUN: mpmd-opt %s -mpmd-order-by-tasks='orders=m1:0F0,0B0,0F1,0B1;m2:1F1,1F0,1I0,1W0' | FileCheck %s --check-prefix=TWO
// RUN: mpmd-opt %s -mpmd-order-by-tasks | FileCheck %s --check-prefix=SAME
// RUN: mpmd-opt %s -mpmd-order-by-tasks='orders=m1:0F0,0B0,0F1,0B1;m2:1F1,1F0,1I0,1W0 remove-control-dependencies=false' | FileCheck %s --check-prefix=EDGES

// Each mesh gets its own order. The whole backward stands where the table has the first of its halves. A stage
// is said by the fragment, or else by its mesh.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// ONE-LABEL: func.func public @main
// ONE:       mesh="m1", origin=["f"]> {{.*}}call_counter = 0
// ONE:       mesh="m1", origin=["f"(1)]> {{.*}}call_counter = 0
// ONE:       mesh="m1", origin=["f"]> {{.*}}call_counter = 1
// ONE:       mesh="m1", origin=["f"(1)]> {{.*}}call_counter = 1
// ONE-NOT:   control

// TWO-LABEL: func.func public @main
// TWO:       mesh="m2", origin=["g"], stage=1> {{.*}}call_counter = 1
// TWO:       mesh="m2", origin=["g"]> {{.*}}call_counter = 0
// TWO:       mesh="m2", origin=["g"(1)]> {{.*}}call_counter = 0

// SAME-LABEL:  func.func public @main
// SAME:        origin=["f"(1)]> {{.*}}call_counter = 1
// SAME:        origin=["f"(1)]> {{.*}}call_counter = 0
// SAME:        origin=["f"]> {{.*}}call_counter = 1
// SAME:        origin=["f"]> {{.*}}call_counter = 0
// EDGES-COUNT-5: mpmd.control_operand_start_idx
// EDGES-NOT: mpmd.control_operand_start_idx
func.func public @main(%a: !m1, %b: !m2) -> (!m1, !m1, !m1, !m2, !m2, !m2)
    attributes {topology = #topology} {
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f0 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %c0 = mpmd.fragment<mesh="m2", origin=["g"(1)]> (%b) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %g0 = mpmd.fragment<mesh="m2", origin=["g"]> (%b) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %g1 = mpmd.fragment<mesh="m2", origin=["g"], stage=1> (%b) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  return %b1, %b0, %f1, %c0, %g0, %g1 : !m1, !m1, !m1, !m2, !m2, !m2
}

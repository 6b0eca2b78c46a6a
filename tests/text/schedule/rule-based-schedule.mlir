// RUN: mpmd-opt %s -mpmd-rule-based-schedule='rules=FragmentScheduleRule(ordered_fragments=[FragmentInfo(origins=["g"],mesh_name="m1",call_counter=0)->FragmentInfo(origins=["nobody"],mesh_name="m1")->FragmentInfo(origins=["f"],mesh_name="m1",call_counter=0)])' -split-input-file | FileCheck %s
// RUN: mpmd-opt %s -mpmd-rule-based-schedule='rules=FragmentScheduleRule(ordered_fragments=[FragmentInfo(origins=["g"],mesh_name="m1",call_counter=0)->FragmentInfo(origins=["f"],mesh_name="m1",call_counter=0)]) remove-control-dependencies=false' -mpmd-rule-based-merge='rules=FragmentMergeRule(sources=[FragmentInfo(origins=["x"],mesh_name="m1"),FragmentInfo(origins=["y"],mesh_name="m1")],target=FragmentInfo(origins=["x"],mesh_name="m1"))' -split-input-file | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// An info that no fragment has is skipped: g comes before f all the same, and the transfer follows f.

// CHECK-LABEL: func.func public @swapped
// CHECK:       origin=["h"]>
// CHECK:       origin=["g"]>
// CHECK:       %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK:       mpmd.transfer %[[F]]
// CHECK-NOT:   control
func.func public @swapped(%a: !m1) -> (!m1, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["h"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %t, %h, %g : !m1, !m1, !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// Data flow says the opposite: nothing happens.

// CHECK-LABEL: func.func public @impossible
// CHECK:       %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK:       mpmd.fragment<mesh="m1", origin=["g"]> (%[[F]])
func.func public @impossible(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

// RUN: mpmd-opt %s -mpmd-rule-based-schedule='rules=FragmentScheduleRule(ordered_fragments=[FragmentInfo(origins=["f"],mesh_name="m1")->FragmentInfo(origins=["g"],mesh_name="m1")])' -verify-diagnostics
// RUN: not mpmd-opt %s -mpmd-rule-based-schedule='rules=FragmentScheduleRule(ordered_fragments=[FragmentInfo(stage=1)])' 2>&1 | FileCheck %s --check-prefix=TEXT

// TEXT: a FragmentInfo needs its origins

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// expected-error@+1 {{Fragment info FragmentInfo(origins=["f"],mesh_name="m1") already exists for another fragment}}
func.func public @main(%a: !m1) -> (!m1, !m1) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g : !m1, !m1
}

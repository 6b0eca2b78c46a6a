// RUN: mpmd-opt %s -mpmd-rule-based-merge='rules=FragmentMergeRule(sources=[FragmentInfo(origins=["f"],call_counter=1,mesh_name="m1"),FragmentInfo(origins=["h","g"],mesh_name="m1")],target=FragmentInfo(origins=["z","f"],stage=4,call_counter=7,mesh_name="m1"))' -split-input-file -verify-diagnostics \
// RUN:   | FileCheck %s

// Fragments that a rule names become one like its target, at the place of the first; the ops are sorted again.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG2:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m2", origin=["k"]> (%[[ARG2]]) (%[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.abs %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V2:.*]]:2 = mpmd.fragment<mesh="m1", origin=["z", "f"], stage=4> (%[[ARG0]], %[[ARG1]], %[[V1]]) {call_counter = 7 : ui32} (%[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]{{.*}}, %[[ARG5:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG3]], %[[ARG3]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.subtract %[[ARG4]], %[[ARG5]]
// CHECK-NEXT:   mpmd.return %[[V4]], %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.transfer %[[V2]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: return %[[V3]], %[[V2]]#1
func.func public @main(%a: !m1, %b: !m1, %c: !m2) -> (!m2, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32, remat} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2
  %k = mpmd.fragment<mesh="m2", origin=["k"]> (%c) (%c_: tensor<4xf32>) {
    %y = stablehlo.abs %c_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m2) -> !m2
  %s = mpmd.transfer %k : (!m2) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g", "h"]> (%b, %s) (%b_: tensor<4xf32>, %s_: tensor<4xf32>) {
    %y = stablehlo.subtract %b_, %s_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %t, %g : !m2, !m1
}

// -----

// Another microbatch, another mesh: nothing matches twice.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 2 : ui32} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["g", "h"]> (%[[ARG0]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m2", origin=["g", "h"]> (%[[ARG1]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]], %[[V1]], %[[V2]]
func.func public @main(%a: !m1, %b: !m2) -> (!m1, !m1, !m2) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 2 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g", "h"]> (%a) (%a_: tensor<4xf32>) {
    %y = stablehlo.negate %a_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m2", origin=["g", "h"]> (%b) (%b_: tensor<4xf32>) {
    %y = stablehlo.negate %b_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m2) -> !m2
  return %f, %g, %h : !m1, !m1, !m2
}

// -----

// What runs between the two needs one and is needed by the other.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// expected-error@+1 {{Cycle detected in the program, not all fragments could be properly merged.}}
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["k"]> (%f) (%f_: tensor<4xf32>) {
    %x = stablehlo.abs %f_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g", "h"]> (%k) (%k_: tensor<4xf32>) {
    %y = stablehlo.negate %k_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

// -----

// %f is used by nothing, but stands above a source that is: it becomes part of it, without what it computed.
// %dead is no source; it goes.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[G:.*]] = mpmd.fragment<mesh="m1", origin=["z", "f"], stage=4> (%[[ARG0]]) {call_counter = 7 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[X:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[X]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[G]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g", "h"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.negate %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %dead = mpmd.fragment<mesh="m1", origin=["k"]> (%g) (%g_: tensor<4xf32>) {
    %x = stablehlo.abs %g_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

// -----

// A source below which nothing is used is no partner: %f stays as it is.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-NEXT: %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK-NEXT:   stablehlo.add
// CHECK-NEXT:   mpmd.return
// CHECK-NEXT: }
// CHECK-NEXT: return %[[F]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g", "h"]> (%f) (%f_: tensor<4xf32>) {
    %x = stablehlo.negate %f_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

// What has effects is not dead.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @effects
// CHECK:       custom_call @show
// CHECK:       {{^ *return}}
func.func public @effects(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %0 = mpmd.fragment<mesh="m1", origin=["s"]> (%a) (%p: tensor<4xf32>) {
    stablehlo.custom_call @show(%p) {has_side_effect = true} : (tensor<4xf32>) -> ()
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %a : !m1
}

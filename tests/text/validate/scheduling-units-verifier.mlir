// RUN: mpmd-opt %s -mpmd-scheduling-units-verifier -split-input-file -verify-diagnostics | FileCheck %s

// Two microbatches, two units of each phase on every mesh that is no host.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2/cpu" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[V0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[V1]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V2]], %[[V3]]
func.func public @main(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f) {call_counter = 0 : ui32} (%f_: tensor<4xf32>) {
    %x = stablehlo.add %f_, %f_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %i = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%g) {call_counter = 1 : ui32} (%g_: tensor<4xf32>) {
    %x = stablehlo.add %g_, %g_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %h, %i : !m1, !m1
}

// -----

// Counters that begin with 1; no microbatches at all.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[V0]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]]
// CHECK-LABEL: func.func private @init(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V1]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f) {call_counter = 1 : ui32} (%f_: tensor<4xf32>) {
    %x = stablehlo.add %f_, %f_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %h : !m1
}
func.func private @init(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

// One unit too many, and one too few.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m1", origin=["k"]> (%[[ARG0]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.abs %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[V0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V3]], %[[V1]], %[[V2]]
// expected-warning@+2 {{Number of forward scheduling units in mesh m1 does not match expected number for 2 microbatches. Got 3.}}
// expected-warning@+1 {{Number of backward scheduling units in mesh m1 does not match expected number for 2 microbatches. Got 1.}}
func.func public @main(%a: !m1) -> (!m1, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["k"]> (%a) {call_counter = 1 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.abs %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f) {call_counter = 0 : ui32} (%f_: tensor<4xf32>) {
    %x = stablehlo.add %f_, %f_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %h, %g, %k : !m1, !m1, !m1
}

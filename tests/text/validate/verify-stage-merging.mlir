// RUN: mpmd-opt %s -mpmd-verify-stage-merging -split-input-file -verify-diagnostics | FileCheck %s

// Other meshes, stages, phases, microbatches, halves and recomputed work are no conflict.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%[[ARG0]]) {call_counter = 1 : ui32} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m1", origin=["f"], stage=1> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%[[ARG0]]) {call_counter = 0 : ui32, remat} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V4:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=0> (%[[ARG0]]) {call_counter = 0 : ui32, split_keep_transferred} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V5:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=0> (%[[ARG0]]) {call_counter = 0 : ui32, split_drop_transferred} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V6:.*]] = mpmd.fragment<mesh="m2", origin=["f"], stage=0> (%[[ARG1]]) {call_counter = 0 : ui32} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V7:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V8:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V9:.*]] = mpmd.fragment<mesh="m1", origin=["f", "f"(1)], stage=0> (%[[ARG0]]) {call_counter = 0 : ui32, remat} (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V10]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]], %[[V1]], %[[V2]], %[[V3]], %[[V4]], %[[V5]], %[[V6]], %[[V7]], %[[V8]]
func.func public @main(%a: !m1, %b: !m2) -> (!m1, !m1, !m1, !m1, !m1, !m1, !m2, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) {call_counter = 1 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["f"], stage=1> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %i = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) {call_counter = 0 : ui32, remat} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %j = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=0> (%a) {call_counter = 0 : ui32, split_keep_transferred} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=0> (%a) {call_counter = 0 : ui32, split_drop_transferred} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %l = mpmd.fragment<mesh="m2", origin=["f"], stage=0> (%b) {call_counter = 0 : ui32} (%b_: tensor<4xf32>) {
    %x = stablehlo.add %b_, %b_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m2) -> !m2
  %m = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %n = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %o = mpmd.fragment<mesh="m1", origin=["f", "f"(1)], stage=0> (%a) {call_counter = 0 : ui32, remat} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g, %h, %i, %j, %k, %l, %m, %n : !m1, !m1, !m1, !m1, !m1, !m1, !m2, !m1, !m1
}

// -----

// Two fragments of one stage and microbatch, kept apart by what runs on another mesh.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2
  %k = mpmd.fragment<mesh="m2", origin=["k"]> (%t) (%t_: tensor<4xf32>) {
    %x = stablehlo.abs %t_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m2) -> !m2
  %s = mpmd.transfer %k : (!m2) -> !m1
  // expected-error@+1 {{[mesh=m1, stage_id=0, transpose_count=0, call_count=0, split_type=nullopt, is_remat=0] for current fragment with origin: [#mpmd.user_origin<"g">]}}
  %g = mpmd.fragment<mesh="m1", origin=["g"], stage=0> (%s) {call_counter = 0 : ui32} (%s_: tensor<4xf32>) {
    %x = stablehlo.add %s_, %s_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

// -----

// No microbatch is in conflict with any; the two others are not in conflict with each other.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

func.func public @main(%a: !m1) -> (!m1, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  // expected-error@+1 {{call_count=-1}}
  %g = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%a) {call_counter = 1 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g, %h : !m1, !m1, !m1
}

// -----

// A stage is one phase.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  // expected-error@+1 {{transposed a different number of times: "f", "f"(1)}}
  %f = mpmd.fragment<mesh="m1", origin=["f", "f"(1)], stage=0> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// RUN: mpmd-opt %s -mpmd-pipeline-scheduler='must-happen-before=ParallelPipelinesWithWrapAround' -split-input-file -verify-diagnostics
// RUN: not mpmd-opt %s -mpmd-pipeline-scheduler='must-happen-before=2F1B' -split-input-file 2>&1 | FileCheck %s

// CHECK: unknown pipeline schedule '2F1B'
// CHECK: there are: none, GPipe, 1F1B

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

func.func public @forward_only(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  // expected-error@+1 {{is for forward passes only; found (fragment "f"(1) on mesh "m1", microbatch 0)}}
  %b = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 3 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %b, %f : !m1, !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

func.func public @equal_counters(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 3 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  // expected-error@+1 {{needs one unit per mesh and microbatch: (fragment "f" on mesh "m1", microbatch 3); (fragment "g"}}
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%a) {call_counter = 3 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g : !m1, !m1
}

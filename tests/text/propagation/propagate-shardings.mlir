// RUN: mpmd-opt %s -sdy-propagation-pipeline -split-input-file | FileCheck %s
// RUN: mpmd-opt %s -mpmd-propagate-shardings -split-input-file | FileCheck %s --implicit-check-not='dot_general{{.*}}sdy.sharding'
// RUN: mpmd-opt %s -mpmd-propagate-shardings='as-dialect=true' -split-input-file | FileCheck %s --check-prefixes=CHECK,GROUPS
// RUN: mpmd-opt %s -mpmd-propagate-shardings='share=true' -split-input-file | FileCheck %s --check-prefix=SHARED

// Four microbatches on two meshes with an accumulator, whose fragments are alike: what Shardy finds for the
// first two holds for all, and is what it finds for the whole program.

sdy.mesh @mesh = <["x"=2, "y"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<8x8xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<8x8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>, <"m2" : <["x"=2, "y"=2]>>>

// CHECK-LABEL: func.func public @main
// CHECK-SAME:  %arg4: !mpmd.mesh_tensor<"m1", tensor<8x8xf32>> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}
// CHECK-SAME:  %arg5: !mpmd.mesh_tensor<"m2", tensor<8x8xf32>> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}
// CHECK-COUNT-4: in_shardings=[<@mesh, [{"x"}, {}]>, <@mesh, [{}, {"y"}]>], out_shardings=[<@mesh, [{"x"}, {"y"}]>]
// CHECK-NOT:   propagation
// SHARED-COUNT-4: func.call @mpmd.body.0(
// SHARED-COUNT-4: func.call @mpmd.body.1(
func.func public @main(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %b: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %c: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %d: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
    %w: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{}, {"y"}]>}, %acc: !m2) -> !m2 attributes {topology = #topology} {
  %f0 = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %w) {call_counter = 0 : ui32} (%p: tensor<8x8xf32>, %q: tensor<8x8xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m1, !m1) -> !m1
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%b, %w) {call_counter = 1 : ui32} (%p: tensor<8x8xf32>, %q: tensor<8x8xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m1, !m1) -> !m1
  %f2 = mpmd.fragment<mesh="m1", origin=["f"]> (%c, %w) {call_counter = 2 : ui32} (%p: tensor<8x8xf32>, %q: tensor<8x8xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m1, !m1) -> !m1
  %f3 = mpmd.fragment<mesh="m1", origin=["f"]> (%d, %w) {call_counter = 3 : ui32} (%p: tensor<8x8xf32>, %q: tensor<8x8xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m1, !m1) -> !m1
  %t0 = mpmd.transfer %f0 : (!m1) -> !m2
  %t1 = mpmd.transfer %f1 : (!m1) -> !m2
  %t2 = mpmd.transfer %f2 : (!m1) -> !m2
  %t3 = mpmd.transfer %f3 : (!m1) -> !m2
  %g0 = mpmd.fragment<mesh="m2", origin=["g"]> (%acc, %t0) {call_counter = 0 : ui32} (%p: tensor<8x8xf32>, %q: tensor<8x8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m2, !m2) -> !m2
  %g1 = mpmd.fragment<mesh="m2", origin=["g"]> (%g0, %t1) {call_counter = 1 : ui32} (%p: tensor<8x8xf32>, %q: tensor<8x8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m2, !m2) -> !m2
  %g2 = mpmd.fragment<mesh="m2", origin=["g"]> (%g1, %t2) {call_counter = 2 : ui32} (%p: tensor<8x8xf32>, %q: tensor<8x8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m2, !m2) -> !m2
  %g3 = mpmd.fragment<mesh="m2", origin=["g"]> (%g2, %t3) {call_counter = 3 : ui32} (%p: tensor<8x8xf32>, %q: tensor<8x8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m2, !m2) -> !m2
  return %g3 : !m2
}

// -----

// A function of no meshes, which says nothing about shardings.

// CHECK-LABEL: func.func @nothing_is_sharded
// CHECK-NEXT:  %[[N:.*]] = stablehlo.negate %arg0 : tensor<8x8xf32>
// CHECK-NEXT:  return %[[N]]
func.func @nothing_is_sharded(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = stablehlo.negate %a : tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}

// -----

sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<8x8xf32>>

// CHECK-LABEL: func.func public @grouped
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["f"], in_shardings=[<@mesh, [{"x"}, {}]>], out_shardings=[<@mesh, [{"x"}, {}]>]>
// GROUPS:      sdy.sharding_group %arg1 group_id=0
func.func public @grouped(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<8x8xf32>) {
    sdy.sharding_group %p group_id=0 : tensor<8x8xf32>
    %0 = stablehlo.negate %p : tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

// The chain begins with a value of another kind, so that the first of its links is another kind of fragment
// than the second: what reads their results is in Shardy's program for both, and the third is like the second.
sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
!s1 = !mpmd.mesh_tensor<"m1", tensor<f32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<8xf32>>

// CHECK-LABEL: func.func public @chain
// CHECK-COUNT-3: origin=["f"], in_shardings=[<@mesh, []>, <@mesh, [{"x"}]>], out_shardings=[<@mesh, []>, <@mesh, [{"x"}]>]>
// CHECK-COUNT-3: mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>}
func.func public @chain(%a: !m1, %b: !m1, %c: !m1, %sum: !s1, %w: !m2 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
    -> (!s1, !m2, !m2, !m2) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  %f0:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%sum, %a) {call_counter = 0 : ui32} (%p: tensor<f32>, %q: tensor<8xf32>) {
    %0 = stablehlo.negate %p : tensor<f32>
    %1 = stablehlo.tanh %q : tensor<8xf32>
    mpmd.return %0, %1 : tensor<f32>, tensor<8xf32>
  } : (!s1, !m1) -> (!s1, !m1)
  %f1:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%f0#0, %b) {call_counter = 1 : ui32} (%p: tensor<f32>, %q: tensor<8xf32>) {
    %0 = stablehlo.negate %p : tensor<f32>
    %1 = stablehlo.tanh %q : tensor<8xf32>
    mpmd.return %0, %1 : tensor<f32>, tensor<8xf32>
  } : (!s1, !m1) -> (!s1, !m1)
  %f2:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%f1#0, %c) {call_counter = 2 : ui32} (%p: tensor<f32>, %q: tensor<8xf32>) {
    %0 = stablehlo.negate %p : tensor<f32>
    %1 = stablehlo.tanh %q : tensor<8xf32>
    mpmd.return %0, %1 : tensor<f32>, tensor<8xf32>
  } : (!s1, !m1) -> (!s1, !m1)
  %t0 = mpmd.transfer %f0#1 : (!m1) -> !m2
  %g0 = mpmd.fragment<mesh="m2", origin=["g"]> (%t0, %w) {call_counter = 0 : ui32} (%p: tensor<8xf32>, %q: tensor<8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!m2, !m2) -> !m2
  %t1 = mpmd.transfer %f1#1 : (!m1) -> !m2
  %g1 = mpmd.fragment<mesh="m2", origin=["g"]> (%t1, %w) {call_counter = 1 : ui32} (%p: tensor<8xf32>, %q: tensor<8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!m2, !m2) -> !m2
  %t2 = mpmd.transfer %f2#1 : (!m1) -> !m2
  %g2 = mpmd.fragment<mesh="m2", origin=["g"]> (%t2, %w) {call_counter = 2 : ui32} (%p: tensor<8xf32>, %q: tensor<8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!m2, !m2) -> !m2
  return %f2#0, %g0, %g1, %g2 : !s1, !m2, !m2, !m2
}

// -----

// The third fragment is of another kind, and what reads its result is not: it is made, and moved, as it is read.
sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
!s1 = !mpmd.mesh_tensor<"m1", tensor<f32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<8xf32>>

// CHECK-LABEL: func.func public @another_kind
// CHECK-COUNT-3: origin=["f"], {{.*}}out_shardings=[<@mesh, [{{.*}}]>, <@mesh, [{"x"}]>]>
// CHECK-COUNT-3: mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>}
func.func public @another_kind(%a: !m1, %b: !m1, %c: !m1, %s: !s1, %r: !s1, %w: !m2 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
    -> (!s1, !m2, !m2, !m2) attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  %f0:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%s, %a) {call_counter = 0 : ui32} (%p: tensor<f32>, %q: tensor<8xf32>) {
    %0 = stablehlo.negate %p : tensor<f32>
    %1 = stablehlo.tanh %q : tensor<8xf32>
    mpmd.return %0, %1 : tensor<f32>, tensor<8xf32>
  } : (!s1, !m1) -> (!s1, !m1)
  %f1:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%s, %b) {call_counter = 1 : ui32} (%p: tensor<f32>, %q: tensor<8xf32>) {
    %0 = stablehlo.negate %p : tensor<f32>
    %1 = stablehlo.tanh %q : tensor<8xf32>
    mpmd.return %0, %1 : tensor<f32>, tensor<8xf32>
  } : (!s1, !m1) -> (!s1, !m1)
  %f2:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%r, %c) {call_counter = 2 : ui32} (%p: tensor<f32>, %q: tensor<8xf32>) {
    %0 = stablehlo.negate %p : tensor<f32>
    %1 = stablehlo.tanh %q : tensor<8xf32>
    mpmd.return %0, %1 : tensor<f32>, tensor<8xf32>
  } : (!s1, !m1) -> (!s1, !m1)
  %t0 = mpmd.transfer %f0#1 : (!m1) -> !m2
  %g0 = mpmd.fragment<mesh="m2", origin=["g"]> (%t0, %w) {call_counter = 0 : ui32} (%p: tensor<8xf32>, %q: tensor<8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!m2, !m2) -> !m2
  %t1 = mpmd.transfer %f1#1 : (!m1) -> !m2
  %g1 = mpmd.fragment<mesh="m2", origin=["g"]> (%t1, %w) {call_counter = 1 : ui32} (%p: tensor<8xf32>, %q: tensor<8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!m2, !m2) -> !m2
  %t2 = mpmd.transfer %f2#1 : (!m1) -> !m2
  %g2 = mpmd.fragment<mesh="m2", origin=["g"]> (%t2, %w) {call_counter = 2 : ui32} (%p: tensor<8xf32>, %q: tensor<8xf32>) {
    %0 = stablehlo.add %p, %q : tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!m2, !m2) -> !m2
  return %r, %g0, %g1, %g2 : !s1, !m2, !m2, !m2
}

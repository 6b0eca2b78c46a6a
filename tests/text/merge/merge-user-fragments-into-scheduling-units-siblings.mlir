// RUN: mpmd-opt %s -mpmd-merge-user-fragments-into-scheduling-units=merge-siblings=true -split-input-file | FileCheck %s

// Two named parts of a stage that do not use each other; unnamed work between them stays, and so does
// another microbatch.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-NOT:  mpmd.fragment<mesh="m1", origin=["f"]
// CHECK: mpmd.fragment<mesh="m1", origin=[]>
// CHECK: mpmd.fragment<mesh="m1", origin=["f", "g"], stage=1> {{.*}} {call_counter = 0 : ui32}
// CHECK-NEXT: stablehlo.add
// CHECK-NEXT: stablehlo.negate
// CHECK: mpmd.fragment<mesh="m1", origin=["f"], stage=1> {{.*}} {call_counter = 1 : ui32}
func.func public @main(%a: !m1, %b: !m1) -> (!m1, !m1, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=1> (%a) {call_counter = 0 : ui32} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %u = mpmd.fragment<mesh="m1", origin=[]> (%b) (%b_: tensor<4xf32>) {
    %x = stablehlo.tanh %b_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"], stage=1> (%b) {call_counter = 0 : ui32} (%b_: tensor<4xf32>) {
    %y = stablehlo.negate %b_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["f"], stage=1> (%b) {call_counter = 1 : ui32} (%b_: tensor<4xf32>) {
    %x = stablehlo.add %b_, %b_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %u, %g, %k : !m1, !m1, !m1, !m1
}

// -----

// Merging moves "p" to "u", which needs "s": "s" is not behind "p" any more.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func.func public @comes_back
// CHECK: mpmd.fragment<mesh="m1", origin=["s"], stage=0>
// CHECK: mpmd.fragment<mesh="m2", origin=["g"], stage=1>
// CHECK: mpmd.fragment<mesh="m1", origin=["p", "u"], stage=0>
func.func public @comes_back(%a: !m1) -> !m1 attributes {topology = #topology} {
  %p = mpmd.fragment<mesh="m1", origin=["p"], stage=0> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.negate %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %s = mpmd.fragment<mesh="m1", origin=["s"], stage=0> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.abs %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %s : (!m1) -> !m2
  %g = mpmd.fragment<mesh="m2", origin=["g"], stage=1> (%t) (%t_: tensor<4xf32>) {
    %x = stablehlo.sine %t_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m2) -> !m2
  %back = mpmd.transfer %g : (!m2) -> !m1
  %u = mpmd.fragment<mesh="m1", origin=["u"], stage=0> (%p, %back) (%p_: tensor<4xf32>, %b_: tensor<4xf32>) {
    %x = stablehlo.add %p_, %b_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %u : !m1
}

// -----

// Parts of two stages, and of two phases of one: they stay apart.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @apart(
// CHECK: mpmd.fragment<mesh="m1", origin=["f"], stage=1>
// CHECK: mpmd.fragment<mesh="m1", origin=["g"], stage=2>
// CHECK: mpmd.fragment<mesh="m1", origin=["h"(1)], stage=2>
func.func public @apart(%a: !m1, %b: !m1) -> (!m1, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], stage=1> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    %x = stablehlo.add %p, %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"], stage=2> (%b) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    %x = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["h"(1)], stage=2> (%b) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    %x = stablehlo.tanh %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g, %h : !m1, !m1, !m1
}

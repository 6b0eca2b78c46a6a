// RUN: mpmd-opt %s -mpmd-merge-inferred-by-round -split-input-file | FileCheck %s

// What stands before the microbatches becomes one fragment, what stands behind them another.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @around_calls
// CHECK-SAME:    (%[[X:[^:]*]]: !mpmd
// CHECK-NEXT:    %[[S:.*]]:2 = mpmd.fragment<mesh="m1", origin=[]> (%[[X]])
// CHECK-NEXT:      abs
// CHECK-NEXT:      negate
// CHECK-NEXT:      mpmd.return
// CHECK-NEXT:    }
// CHECK-NEXT:    %[[A:.*]] = mpmd.call @body(%[[S]]#0) {call_counter = 0 : ui32}
// CHECK-NEXT:    %[[B:.*]] = mpmd.call @body(%[[S]]#1) {call_counter = 1 : ui32}
// CHECK-NEXT:    %[[R:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[B]], %[[A]])
// CHECK-NEXT:      tanh
// CHECK-NEXT:      add
// CHECK-NEXT:      mpmd.return
// CHECK-NEXT:    }
// CHECK-NEXT:    return %[[R]]
func.func public @around_calls(%x: !m1) -> !m1
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %s0 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%a: tensor<4xf32>) {
    %r = stablehlo.abs %a : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (!m1) -> !m1
  %0 = mpmd.call @body(%s0) {call_counter = 0 : ui32} : (!m1) -> !m1
  %s1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%a: tensor<4xf32>) {
    %r = stablehlo.negate %a : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (!m1) -> !m1
  %1 = mpmd.call @body(%s1) {call_counter = 1 : ui32} : (!m1) -> !m1
  %u = mpmd.fragment<mesh="m1", origin=[]> (%1) (%a: tensor<4xf32>) {
    %r = stablehlo.tanh %a : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (!m1) -> !m1
  %v = mpmd.fragment<mesh="m1", origin=[]> (%u, %0) (%a: tensor<4xf32>, %b: tensor<4xf32>) {
    %r = stablehlo.add %a, %b : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %v : !m1
}
func.func private @body(%x: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  return %x : !m1
}

// -----

// A value that crosses to another mesh and back closes no cycle: the second half is a round of its own.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

// CHECK-LABEL: func.func public @there_and_back
// CHECK:         %[[P:.*]] = mpmd.fragment<mesh="m1", origin=[]>
// CHECK:         %[[T:.*]] = mpmd.transfer %[[P]]
// CHECK:         %[[Q:.*]] = mpmd.fragment<mesh="m2", origin=[]> (%[[T]])
// CHECK:         %[[U:.*]] = mpmd.transfer %[[Q]]
// CHECK:         mpmd.fragment<mesh="m1", origin=[]> (%[[U]])
func.func public @there_and_back(%x: !m1) -> (!m1, !m1, !m1)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>, <"m2" : <["x"=1]>>>} {
  %0 = mpmd.fragment<mesh="m1", origin=["f"]> (%x) {call_counter = 0 : ui32} (%a: tensor<4xf32>) {
    mpmd.return %a : tensor<4xf32>
  } : (!m1) -> !m1
  %1 = mpmd.fragment<mesh="m1", origin=["f"]> (%x) {call_counter = 1 : ui32} (%a: tensor<4xf32>) {
    mpmd.return %a : tensor<4xf32>
  } : (!m1) -> !m1
  %p = mpmd.fragment<mesh="m1", origin=[]> (%0) (%a: tensor<4xf32>) {
    %r = stablehlo.tanh %a : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %p : (!m1) -> !m2
  %q = mpmd.fragment<mesh="m2", origin=[]> (%t) (%a: tensor<4xf32>) {
    %r = stablehlo.abs %a : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (!m2) -> !m2
  %u = mpmd.transfer %q : (!m2) -> !m1
  %v = mpmd.fragment<mesh="m1", origin=[]> (%u) (%a: tensor<4xf32>) {
    %r = stablehlo.negate %a : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (!m1) -> !m1
  return %0, %1, %v : !m1, !m1, !m1
}

// -----

// Without microbatches nothing is merged here.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @no_microbatches
// CHECK-COUNT-2: mpmd.fragment<mesh="m1", origin=[]>
func.func public @no_microbatches(%x: !m1) -> !m1
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %0 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%a: tensor<4xf32>) {
    %r = stablehlo.abs %a : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (!m1) -> !m1
  %1 = mpmd.fragment<mesh="m1", origin=[]> (%0) (%a: tensor<4xf32>) {
    %r = stablehlo.negate %a : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (!m1) -> !m1
  return %1 : !m1
}

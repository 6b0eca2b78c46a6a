// RUN: mpmd-opt %s -mpmd-infer-mesh-rewrite-using-analysis='by-round=true' -split-input-file | FileCheck %s

// One fragment per mesh before and one after the microbatches.  The constant is trivial: each round has its
// own.  What only the second round reads is done there, though its operand is there before.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func.func public @around
// CHECK-DAG:     %[[A1:.*]] = mpmd.assign %arg0 {{.*}}"m1"
// CHECK-DAG:     %[[A2:.*]] = mpmd.assign %arg0 {{.*}}"m2"
// CHECK-DAG:     %[[W:.*]] = mpmd.assign %arg1
// CHECK:         %[[P:.*]]:2 = mpmd.fragment<mesh="m1", origin=[]> (%[[A1]]) {mpmd.inferred_by = ["infer_mesh_wrap_meshless_ops"]} (%[[X:.*]]: tensor<4xf32>) {
// CHECK-NEXT:      %[[K:.*]] = stablehlo.constant
// CHECK-NEXT:      %[[S:.*]] = stablehlo.add %[[X]], %[[K]]
// CHECK-NEXT:      %[[T:.*]] = stablehlo.abs %[[S]]
// CHECK-NEXT:      mpmd.return %[[S]], %[[T]]
// CHECK:         %[[Q:.*]] = mpmd.fragment<mesh="m2", origin=[]> (%[[A2]])
// CHECK-NEXT:      stablehlo.constant
// CHECK-NEXT:      stablehlo.add
// CHECK-NEXT:      mpmd.return
// CHECK:         %[[C:.*]] = mpmd.call @body(%[[P]]#0, %[[Q]]) {call_counter = 0 : ui32}
// CHECK-NEXT:    %[[CU:.*]] = mpmd.unassign %[[C]]
// CHECK-NEXT:    %[[CA:.*]] = mpmd.assign %[[CU]]
// CHECK-NEXT:    %[[D:.*]] = mpmd.call @body(%[[P]]#1, %[[Q]]) {call_counter = 1 : ui32}
// CHECK-NEXT:    %[[DU:.*]] = mpmd.unassign %[[D]]
// CHECK-NEXT:    %[[DA:.*]] = mpmd.assign %[[DU]]
// CHECK-NEXT:    %[[R:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[W]], %[[CA]], %[[DA]]) {{.*}} (%[[Y:.*]]: tensor<4xf32>, %[[Z:.*]]: tensor<4xf32>, %[[V:.*]]: tensor<4xf32>) {
// CHECK-NEXT:      %[[L:.*]] = stablehlo.constant
// CHECK-NEXT:      %[[M:.*]] = stablehlo.multiply %[[Y]], %[[Y]]
// CHECK-NEXT:      %[[O:.*]] = stablehlo.add %[[Z]], %[[V]]
// CHECK-NEXT:      %[[B:.*]] = stablehlo.divide %[[O]], %[[L]]
// CHECK-NEXT:      %[[E:.*]] = stablehlo.subtract %[[M]], %[[B]]
// CHECK-NEXT:      mpmd.return %[[E]]
// CHECK:         return %[[R]]
func.func public @around(%a: tensor<4xf32>, %w: tensor<4xf32>) -> !m1 attributes {topology = #topology} {
  %k = stablehlo.constant dense<2.0> : tensor<4xf32>
  %m = stablehlo.multiply %w, %w : tensor<4xf32>
  %s = stablehlo.add %a, %k : tensor<4xf32>
  %t = stablehlo.abs %s : tensor<4xf32>
  %0 = mpmd.call @body(%s, %s) {call_counter = 0 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %1 = mpmd.call @body(%t, %s) {call_counter = 1 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %o = stablehlo.add %0, %1 {mpmd.use_set = #mpmd.meshes_with_origins<"m1">} : tensor<4xf32>
  %b = stablehlo.divide %o, %k : tensor<4xf32>
  %e = stablehlo.subtract %m, %b : tensor<4xf32>
  %r = mpmd.assign %e : (tensor<4xf32>) -> !m1
  return %r : !m1
}

func.func private @body(%x: tensor<4xf32>, %y: tensor<4xf32>)
    -> (tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1">}) attributes {topology = #topology} {
  %x1 = mpmd.assign %x : (tensor<4xf32>) -> !m1
  %y2 = mpmd.assign %y : (tensor<4xf32>) -> !m2
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%x1) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m2", origin=["g"]> (%y2) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %u = mpmd.unassign %f : (!m1) -> tensor<4xf32>
  return %u : tensor<4xf32>
}

// -----

// The second round is read before all of its operands are there: the calls in between move.  A sum of values
// of another mesh stays on its own, and so does an op that a named fragment reads.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func.func public @moved
// CHECK:         %[[C0:.*]] = mpmd.call {{.*}} {call_counter = 0 : ui32}
// CHECK-NEXT:    %[[U0:.*]] = mpmd.unassign %[[C0]]
// CHECK-NEXT:    %[[A0:.*]] = mpmd.assign %[[U0]]
// CHECK:         %[[C2:.*]] = mpmd.call {{.*}} {call_counter = 2 : ui32}
// CHECK-NEXT:    %[[U2:.*]] = mpmd.unassign %[[C2]]
// CHECK-NEXT:    %[[A2:.*]] = mpmd.assign %[[U2]]
// CHECK:         %[[G:.*]]:2 = mpmd.fragment<mesh="m1", origin=[]> (%[[A0]], %[[A2]])
// CHECK-NEXT:      negate
// CHECK-NEXT:      tanh
// CHECK:         %[[C1:.*]] = mpmd.call @body(%[[G]]#0) {call_counter = 1 : ui32}
// CHECK:         mpmd.fragment<mesh="m2", origin=[]>
// CHECK-NEXT:      add
// CHECK-NEXT:      mpmd.return
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK-NEXT:      abs
func.func public @moved(%a: tensor<4xf32>) -> (!m1, !m2, !m1) attributes {topology = #topology} {
  %0 = mpmd.call @body(%a) {call_counter = 0 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %n = stablehlo.negate %0 : tensor<4xf32>
  %1 = mpmd.call @body(%n) {call_counter = 1 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %2 = mpmd.call @body(%a) {call_counter = 2 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %t = stablehlo.tanh %2 : tensor<4xf32>
  %s = stablehlo.add %1, %2 {mpmd.use_set = #mpmd.meshes_with_origins<"m2">} : tensor<4xf32>
  %h = stablehlo.abs %1 : tensor<4xf32>
  %x = mpmd.assign %h : (tensor<4xf32>) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %y = mpmd.assign %t : (tensor<4xf32>) -> !m1
  %z = mpmd.assign %s : (tensor<4xf32>) -> !m2
  return %y, %z, %f : !m1, !m2, !m1
}

func.func private @body(%x: tensor<4xf32>)
    -> (tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1">}) attributes {topology = #topology} {
  %x1 = mpmd.assign %x : (tensor<4xf32>) -> !m1
  %u = mpmd.unassign %x1 : (!m1) -> tensor<4xf32>
  return %u : tensor<4xf32>
}

// -----

// What may be done only once is in no group: it would be done once on each mesh.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func.func public @effects
// CHECK-COUNT-1: custom_call @draw
// CHECK-NOT:     custom_call
// CHECK:         func.func private @both
func.func public @effects(%a: tensor<4xf32>) -> (!m1, !m1) attributes {topology = #topology} {
  %0 = stablehlo.custom_call @draw(%a) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>
  %1 = mpmd.call @both(%0) {call_counter = 0 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %2 = mpmd.call @both(%0) {call_counter = 1 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %x = mpmd.assign %1 : (tensor<4xf32>) -> !m1
  %y = mpmd.assign %2 : (tensor<4xf32>) -> !m1
  return %x, %y : !m1, !m1
}

func.func private @both(%x: tensor<4xf32>)
    -> (tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1">}) attributes {topology = #topology} {
  %x1 = mpmd.assign %x : (tensor<4xf32>) -> !m1
  %x2 = mpmd.assign %x : (tensor<4xf32>) -> !m2
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%x1) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m2", origin=["g"]> (%x2) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %u = mpmd.unassign %f : (!m1) -> tensor<4xf32>
  return %u : tensor<4xf32>
}

// RUN: mpmd-opt %s -mpmd-infer-mesh-rewrite-using-analysis | FileCheck %s
// RUN: mpmd-opt %s -mpmd-infer-mesh-rewrite-using-analysis='max-clones=2' | FileCheck %s --check-prefix=CLONES

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!n1 = !mpmd.mesh_tensor<"m1", tensor<ui32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// One fragment uses it: inlined, and what it reads with it; equal operands are read once.
// CHECK-LABEL: func @inlined
func.func @inlined(%a: tensor<4xf32>, %b: tensor<4xf32>) -> !m1 attributes {topology = #topology} {
  // CHECK-NEXT: %[[B:.*]] = mpmd.assign %arg1
  // CHECK-NEXT: %[[A:.*]] = mpmd.assign %arg0
  // CHECK-NEXT: %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[B]], %[[A]]) (%arg2: tensor<4xf32>, %arg3: tensor<4xf32>) {
  // CHECK-NEXT:   %[[N:.*]] = stablehlo.negate %arg3
  // CHECK-NEXT:   %[[S:.*]] = stablehlo.add %[[N]], %arg2
  // CHECK-NEXT:   %[[T:.*]] = stablehlo.tanh %[[S]]
  // CHECK-NEXT:   mpmd.return %[[T]]
  // CHECK:      return %[[F]]
  %0 = stablehlo.negate %a : tensor<4xf32>
  %1 = stablehlo.add %0, %b : tensor<4xf32>
  %x = mpmd.assign %1 : (tensor<4xf32>) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%p: tensor<4xf32>) {
    %2 = stablehlo.tanh %p : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// Two fragments use the sum: more than one clone, so it gets a fragment of its own on each mesh, m1 first.
// The negation is trivial and is cloned.
// CHECK-LABEL: func @wrapped
// CLONES-LABEL: func @wrapped
// CLONES-NOT: origin=[]
// CLONES: mpmd.fragment<mesh="m1", origin=["f"]>
// CLONES: stablehlo.add
// CLONES: stablehlo.tanh
// CLONES: mpmd.fragment<mesh="m2", origin=["g"]>
// CLONES: stablehlo.add
// CLONES: stablehlo.abs
func.func @wrapped(%a: tensor<4xf32>) -> (!m1, !m2) attributes {topology = #topology} {
  // CHECK:      %[[W1:.*]] = mpmd.fragment<mesh="m1", origin=[]> ({{.*}}) {mpmd.inferred_by = ["infer_mesh_wrap_meshless_ops"]} (%arg1: tensor<4xf32>) {
  // CHECK-NEXT:   %[[N:.*]] = stablehlo.negate %arg1
  // CHECK-NEXT:   stablehlo.add %[[N]], %[[N]]
  // CHECK:      %[[U1:.*]] = mpmd.unassign %[[W1]]
  // CHECK:      %[[W2:.*]] = mpmd.fragment<mesh="m2", origin=[]>
  // CHECK-NEXT:   stablehlo.negate
  // CHECK:      %[[U2:.*]] = mpmd.unassign %[[W2]]
  // CHECK-NEXT: %[[X:.*]] = mpmd.assign %[[U1]]
  // CHECK-NEXT: %[[Y:.*]] = mpmd.assign %[[U2]]
  // CHECK-NEXT: mpmd.fragment<mesh="m1", origin=["f"]> (%[[X]])
  // CHECK:      mpmd.fragment<mesh="m2", origin=["g"]> (%[[Y]])
  %0 = stablehlo.negate %a : tensor<4xf32>
  %1 = stablehlo.add %0, %0 : tensor<4xf32>
  %x = mpmd.assign %1 : (tensor<4xf32>) -> !m1
  %y = mpmd.assign %1 : (tensor<4xf32>) -> !m2
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%p: tensor<4xf32>) {
    %2 = stablehlo.tanh %p : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m2", origin=["g"]> (%y) (%p: tensor<4xf32>) {
    %2 = stablehlo.abs %p : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (!m2) -> !m2
  return %f, %g : !m1, !m2
}

// An op with effects is done once, however few operands it has.
// CHECK-LABEL: func @effects
func.func @effects() -> (!m1, !m1) attributes {topology = #topology} {
  // CHECK:     mpmd.fragment<mesh="m1", origin=[]> () {{.*}} () {
  // CHECK-NEXT:  stablehlo.custom_call @draw
  // CHECK-NOT: custom_call
  // CHECK: return
  %0 = stablehlo.custom_call @draw() {has_side_effect = true} : () -> tensor<4xf32>
  %x = mpmd.assign %0 : (tensor<4xf32>) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%x) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g : !m1, !m1
}

// Two meshes need its result: it is done on the one where its operand can be, and the other reads that.
// CHECK-LABEL: func @effects_of_two_meshes
func.func @effects_of_two_meshes(%a: tensor<4xf32>) -> (!m1, !m2) attributes {topology = #topology} {
  // CHECK:      %[[A:.*]] = mpmd.assign %arg0 {{.*}}"m2"
  // CHECK-NEXT: %[[D:.*]] = mpmd.fragment<mesh="m2", origin=[]> (%[[A]])
  // CHECK-NEXT:   stablehlo.custom_call @draw
  // CHECK:      %[[U:.*]] = mpmd.unassign %[[D]]
  // CHECK-NOT:  custom_call
  // CHECK:      %[[X:.*]] = mpmd.assign %[[U]] {{.*}}"m1"
  // CHECK-NEXT: %[[Y:.*]] = mpmd.assign %[[U]] {{.*}}"m2"
  // CHECK-NEXT: return %[[X]], %[[Y]]
  %0 = stablehlo.custom_call @draw(%a) {has_side_effect = true, mpmd.src_set = #mpmd.meshes_with_origins<"m2">} : (tensor<4xf32>) -> tensor<4xf32>
  %x = mpmd.assign %0 : (tensor<4xf32>) -> !m1
  %y = mpmd.assign %0 : (tensor<4xf32>) -> !m2
  return %x, %y : !m1, !m2
}

// A fragment that reads another one's result grows beside it.
// CHECK-LABEL: func @growing_together
func.func @growing_together(%a: tensor<4xf32>) -> !m1 attributes {topology = #topology} {
  // CHECK:      %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]>
  // CHECK-NEXT:   stablehlo.negate
  // CHECK:      mpmd.fragment<mesh="m1", origin=["g"]> (%[[F]], {{.*}})
  // CHECK-NEXT:   stablehlo.tanh %arg2
  %0 = stablehlo.negate %a : tensor<4xf32>
  %1 = stablehlo.tanh %a : tensor<4xf32>
  %x = mpmd.assign %0 : (tensor<4xf32>) -> !m1
  %y = mpmd.assign %1 : (tensor<4xf32>) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f, %y) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %2 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %g : !m1
}

// The index of a loop is on a mesh only if its body reads it.
// CHECK-LABEL: func @loops
func.func @loops(%a: tensor<ui32>) -> (!n1, !n1) attributes {topology = #topology} {
  // CHECK: mpmd.for {{.*}} (%arg1: !mpmd.mesh_tensor<"m1", tensor<ui32>>, %index: !mpmd.mesh_tensor<"m1", tensor<ui32>>)
  %0 = mpmd.for (%a) {arg_attrs = [{}, {mpmd.use_set = #mpmd.meshes_with_origins<"m1">}], iterations = 2 : ui32, unroll_factor = 2 : ui32} (%p: tensor<ui32>, %index: tensor<ui32>) {
    %2 = stablehlo.add %p, %index {mpmd.use_set = #mpmd.meshes_with_origins<"m1">} : tensor<ui32>
    mpmd.return %2 : tensor<ui32>
  } : tensor<ui32>
  // CHECK: mpmd.for {{.*}} (%arg1: !mpmd.mesh_tensor<"m1", tensor<ui32>>, %index: tensor<ui32>)
  %1 = mpmd.for (%a) {arg_attrs = [{}, {mpmd.use_set = #mpmd.meshes_with_origins<"m1">}], iterations = 2 : ui32, unroll_factor = 2 : ui32} (%p: tensor<ui32>, %index: tensor<ui32>) {
    %2 = stablehlo.negate %p {mpmd.use_set = #mpmd.meshes_with_origins<"m1">} : tensor<ui32>
    mpmd.return %2 : tensor<ui32>
  } : tensor<ui32>
  %x = mpmd.assign %0 : (tensor<ui32>) -> !n1
  %y = mpmd.assign %1 : (tensor<ui32>) -> !n1
  return %x, %y : !n1, !n1
}

// What is needed on two meshes is passed twice.
// CHECK-LABEL: func @caller
func.func @caller(%a: tensor<4xf32>) -> (!m1, !m2) attributes {topology = #topology} {
  // CHECK-NEXT: %[[A1:.*]] = mpmd.assign %arg0 {{.*}}"m1"
  // CHECK-NEXT: %[[A2:.*]] = mpmd.assign %arg0 {{.*}}"m2"
  // CHECK-NEXT: %[[C:.*]]:2 = mpmd.call @callee(%[[A1]], %[[A2]]) {call_counter = 3 : ui32}
  // CHECK-DAG:  %[[U:.*]] = mpmd.unassign %[[C]]#0
  // CHECK-DAG:  %[[V:.*]] = mpmd.unassign %[[C]]#1
  // CHECK-DAG:  %[[X:.*]] = mpmd.assign %[[V]] {{.*}}"m1"
  // CHECK-DAG:  %[[Y:.*]] = mpmd.assign %[[U]] {{.*}}"m2"
  // CHECK:      return %[[X]], %[[Y]]
  %0 = mpmd.call @callee(%a) {call_counter = 3 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %x = mpmd.assign %0 : (tensor<4xf32>) -> !m1
  %y = mpmd.assign %0 : (tensor<4xf32>) -> !m2
  return %x, %y : !m1, !m2
}

// CHECK: func private @callee
// CHECK-SAME: %arg0: !mpmd.mesh_tensor<"m1", tensor<4xf32>> {mpmd.copies = array<i64: 1>}, %arg1: !mpmd.mesh_tensor<"m2", tensor<4xf32>>
// CHECK-SAME: mpmd.copies = array<i64: 1>
func.func private @callee(%p: tensor<4xf32>) -> (tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m2", "m1">})
    attributes {topology = #topology} {
  return %p : tensor<4xf32>
}

// All work is in fragments already.
// CHECK-LABEL: func @done
func.func @done(%a: !m1) -> !m2 attributes {topology = #topology} {
  // CHECK-NEXT: %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%arg0)
  // CHECK:      %[[T:.*]] = mpmd.transfer %[[F]]
  // CHECK-NEXT: return %[[T]]
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2
  return %t : !m2
}

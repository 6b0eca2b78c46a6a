// RUN: mpmd-opt %s -mpmd-infer-mesh-pipeline | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!s1 = !mpmd.mesh_tensor<"m1", tensor<i32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// What comes before a fragment goes into it, what comes after gets a fragment of its own.
// CHECK-LABEL: func @before_and_after
// CHECK-SAME: (%arg0: !mpmd.mesh_tensor<"m1", tensor<4xf32>>, %arg1: !mpmd.mesh_tensor<"m1", tensor<4xf32>>)
func.func @before_and_after(%a: tensor<4xf32>, %unused: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) (%arg2: tensor<4xf32>) {
  // CHECK-NEXT:   %[[C:.*]] = stablehlo.constant
  // CHECK-NEXT:   %[[S:.*]] = stablehlo.multiply %arg2, %[[C]]
  // CHECK-NEXT:   stablehlo.negate %[[S]]
  // CHECK:      %[[T:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[F]]) {mpmd.inferred_by = ["infer_mesh_wrap_meshless_ops"]} (%arg2: tensor<4xf32>) {
  // CHECK-NEXT:   stablehlo.tanh %arg2
  // CHECK:      return %[[T]]
  %c = stablehlo.constant dense<2.0> : tensor<4xf32>
  %s = stablehlo.multiply %a, %c : tensor<4xf32>
  %p = mpmd.assign {origin = "f"} %s : (tensor<4xf32>) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%p) (%x: tensor<4xf32>) {
    %0 = stablehlo.negate %x : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %u = mpmd.unassign {origin = "f"} %f : (!m1) -> tensor<4xf32>
  %t = stablehlo.tanh %u : tensor<4xf32>
  return %t : tensor<4xf32>
}

// What a region captures counts as read; a callee passes on what is needed on two meshes twice.
// CHECK-LABEL: func @calls
// CHECK-SAME: %arg0: !mpmd.mesh_tensor<"m1", tensor<4xf32>>, %arg1: !mpmd.mesh_tensor<"m1", tensor<i32>>
func.func @calls(%a: tensor<4xf32>, %i: tensor<i32>) -> (!m1, !m2) attributes {topology = #topology} {
  // CHECK-DAG: %[[A:.*]] = mpmd.transfer %arg0
  // CHECK-DAG: %[[I:.*]] = mpmd.transfer %arg1
  // CHECK:     %[[C:.*]]:2 = mpmd.call @choose
  // CHECK:     return %[[C]]#{{[01]}}, %[[C]]#{{[01]}}
  %0 = mpmd.call @choose(%a, %i) : (tensor<4xf32>, tensor<i32>) -> tensor<4xf32>
  %x = mpmd.assign %0 : (tensor<4xf32>) -> !m1
  %y = mpmd.assign %0 : (tensor<4xf32>) -> !m2
  return %x, %y : !m1, !m2
}

// CHECK: func private @choose
// CHECK: mpmd.fragment<mesh="m1", origin=[]>
// CHECK: stablehlo.case
// CHECK: mpmd.fragment<mesh="m2", origin=[]>
// CHECK: stablehlo.case
func.func private @choose(%p: tensor<4xf32>, %i: tensor<i32>) -> tensor<4xf32> attributes {topology = #topology} {
  %0 = "stablehlo.case"(%i) ({
    %1 = stablehlo.negate %p : tensor<4xf32>
    stablehlo.return %1 : tensor<4xf32>
  }, {
    stablehlo.return %p : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// A loop that is not unrolled stays on one mesh.
// CHECK-LABEL: func @loop
// CHECK-SAME: %arg0: !mpmd.mesh_tensor<"m1", tensor<i32>>
func.func @loop(%a: tensor<i32>) -> !s1 attributes {topology = #topology} {
  // CHECK-NEXT: %[[L:.*]] = mpmd.for (%arg0) {{.*}}(%arg1: !mpmd.mesh_tensor<"m1", tensor<i32>>, %index: !mpmd.mesh_tensor<"m1", tensor<i32>>) {
  // CHECK-NEXT:   %[[F:.*]] = mpmd.fragment<mesh="m1", origin=[]>
  // CHECK-NEXT:     stablehlo.add
  // CHECK:        mpmd.return %[[F]]
  // CHECK:      return %[[L]]
  %0 = mpmd.for (%a) {iterations = 3 : ui32, unroll_factor = 1 : ui32} (%p: tensor<i32>, %i: tensor<i32>) {
    %1 = stablehlo.add %p, %i : tensor<i32>
    mpmd.return %1 : tensor<i32>
  } : tensor<i32>
  %x = mpmd.assign %0 : (tensor<i32>) -> !s1
  return %x : !s1
}

// RUN: mpmd-opt %s -mpmd-map-named-ops-to-mpmd-ops='assignment=f@m1/0,t@m2#pinned_host' | FileCheck %s

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func @computation_and_tensor
func.func @computation_and_tensor(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: %[[A:.*]] = mpmd.assign {origin = "f"} %arg0
  // CHECK-NEXT: %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)], stage=0> (%[[A]], %[[A]]) (%arg1: tensor<4xf32>, %arg2: tensor<4xf32>) {
  // CHECK-NEXT:   stablehlo.add %arg1, %arg2
  // CHECK:      %[[U:.*]] = mpmd.unassign {origin = "f"} %[[F]]
  // CHECK-NEXT: %[[T:.*]] = mpmd.assign {origin = "t"} %[[U]]
  // CHECK-SAME: !mpmd.mesh_tensor<"m2", tensor<4xf32>, memory_kind="pinned_host">
  // CHECK-NEXT: %[[W:.*]] = mpmd.unassign {origin = "t"} %[[T]]
  // CHECK-NEXT: return %[[W]]
  %0 = mpmd.named_computation<"f"(1)> (%a, %a) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %1 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %2 = mpmd.named_tensor %0 name="t" : tensor<4xf32>
  return %2 : tensor<4xf32>
}

// Tokens pass without a mesh; an unassigned tensor name is no more than its value.
// CHECK-LABEL: func @tokens_and_unassigned
func.func @tokens_and_unassigned(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK-NEXT: %[[TOKEN:.*]] = stablehlo.create_token
  // CHECK-NEXT: %[[A:.*]] = mpmd.assign {origin = "f"} %arg0
  // CHECK-NEXT: %[[F:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"], stage=0> (%[[A]], %[[TOKEN]])
  // CHECK:      %[[U:.*]] = mpmd.unassign {origin = "f"} %[[F]]#0
  // CHECK-NEXT: return %[[U]]
  %token = stablehlo.create_token : !stablehlo.token
  %0:2 = mpmd.named_computation<"f"> (%a, %token) (%p: tensor<4xf32>, %q: !stablehlo.token) {
    mpmd.return %p, %q : tensor<4xf32>, !stablehlo.token
  } : (tensor<4xf32>, !stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)
  %1 = mpmd.named_tensor %0#0 name="nobody" : tensor<4xf32>
  return %1 : tensor<4xf32>
}

// In other regions names stay; validation reports them.
// CHECK-LABEL: func @in_a_branch
func.func @in_a_branch(%i: tensor<i32>, %a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK: "stablehlo.case"
  // CHECK: mpmd.named_tensor %arg1 name="t"
  // CHECK-NOT: mpmd.assign
  // CHECK: return
  %0 = "stablehlo.case"(%i) ({
    %1 = mpmd.named_tensor %a name="t" : tensor<4xf32>
    stablehlo.return %1 : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// RUN: mpmd-opt %s -mpmd-infer-mesh-assign-mesh-func-leaves | FileCheck %s --implicit-check-not=use_set

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m10" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// An unused argument is anywhere; a result where it can be, preferably where it is needed.
// CHECK-LABEL: func @entry(%arg0: tensor<4xf32>, %arg1: !mpmd.mesh_tensor<"m1"
func.func @entry(%a: tensor<4xf32>, %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) attributes {topology = #topology} {
  // CHECK-NEXT: %[[N:.*]] = stablehlo.negate
  // CHECK-NEXT: %[[T:.*]] = stablehlo.tanh
  // CHECK-NEXT: mpmd.assign {origin = "inferred_unused"} %[[T]] {{.*}}"m10"
  // CHECK-NEXT: %[[P:.*]] = mpmd.assign {origin = "inferred_out"} %[[N]] {{.*}}"m2"
  // CHECK-NEXT: %[[Q:.*]] = mpmd.assign {origin = "inferred_out"} %arg0 {{.*}}"m1"
  // CHECK-NEXT: return %[[P]], %[[Q]]
  %0 = stablehlo.negate %a {mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">, mpmd.use_set = #mpmd.meshes_with_origins<"m2">} : tensor<4xf32>
  %1 = stablehlo.tanh %a {mpmd.src_set = #mpmd.meshes_with_origins<"m2", "m10">} : tensor<4xf32>
  return %0, %a : tensor<4xf32>, tensor<4xf32>
}

// Annotations are put on every mesh of the source set, in mesh order; everything else on the first.
// CHECK-LABEL: func @without_results
func.func @without_results(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK: mpmd.fragment<mesh="m2", origin=[]> {{.*}}mpmd.inferred_by = ["infer_mesh_wrap_resultless_ops"]
  // CHECK-NEXT: sdy.sharding_group
  // CHECK: mpmd.fragment<mesh="m10", origin=[]>
  // CHECK-NEXT: sdy.sharding_group
  // CHECK: mpmd.fragment<mesh="m2", origin=[]> () {{.*}} () {
  // CHECK-NEXT: stablehlo.create_token
  // CHECK: mpmd.fragment<mesh="m2", origin=[]>
  // CHECK-NEXT: stablehlo.custom_call @print
  // CHECK-NOT: mpmd.fragment
  sdy.sharding_group %a group_id=0 {mpmd.src_set = #mpmd.meshes_with_origins<"m10", "m2">} : tensor<4xf32>
  %token = stablehlo.create_token {mpmd.src_set = #mpmd.meshes_with_origins<"m10", "m2">} : !stablehlo.token
  stablehlo.custom_call @print(%a) {has_side_effect = true, mpmd.src_set = #mpmd.meshes_with_origins<"m10", "m2">} : (tensor<4xf32>) -> ()
  return %a : tensor<4xf32>
}

// The operand of a broadcast goes where its result is needed, if it can be there.
// CHECK-LABEL: func @broadcast
func.func @broadcast(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // CHECK: %[[N:.*]] = stablehlo.negate
  // CHECK-NEXT: %[[P:.*]] = mpmd.assign {origin = "broadcast"} %[[N]] {{.*}}"m2"
  // CHECK-NEXT: %[[U:.*]] = mpmd.unassign %[[P]]
  // CHECK-NEXT: mpmd.broadcast %[[U]]
  %0 = stablehlo.negate %a {mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">} : tensor<4xf32>
  %1 = mpmd.broadcast {mpmd.use_set = #mpmd.meshes_with_origins<"m2">} %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}

// CHECK-LABEL: func @caller
func.func @caller(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %0:2 = mpmd.call @callee(%a, %b) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %0#0 : tensor<4xf32>
}

// What a callee does not use, and what no call uses, gets a use set.
// CHECK: func private @callee
// CHECK-SAME: %arg1: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1"["inferred_unused_callee_in"]>}
// CHECK-SAME: -> (tensor<4xf32>, tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1"["inferred_unused_callee_out"]>})
func.func private @callee(%p: tensor<4xf32>, %q: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #topology} {
  %0 = stablehlo.negate %p : tensor<4xf32>
  return %p, %0 : tensor<4xf32>, tensor<4xf32>
}

// Everything is used, and what is returned has a mesh.
// CHECK-LABEL: func @no_leaves
func.func @no_leaves(%a: !mpmd.mesh_tensor<"m1", tensor<4xf32>>) -> !mpmd.mesh_tensor<"m2", tensor<4xf32>> attributes {topology = #topology} {
  // CHECK-NEXT: %[[U:.*]] = mpmd.unassign %arg0
  // CHECK-NEXT: %[[N:.*]] = stablehlo.negate %[[U]]
  // CHECK-NEXT: %[[A:.*]] = mpmd.assign %[[N]]
  // CHECK-NEXT: return %[[A]]
  %u = mpmd.unassign %a : (!mpmd.mesh_tensor<"m1", tensor<4xf32>>) -> tensor<4xf32>
  %0 = stablehlo.negate %u : tensor<4xf32>
  %1 = mpmd.assign %0 : (tensor<4xf32>) -> !mpmd.mesh_tensor<"m2", tensor<4xf32>>
  return %1 : !mpmd.mesh_tensor<"m2", tensor<4xf32>>
}

// RUN: mpmd-opt %s -mpmd-infer-mesh-assign-using-input-output-constraints='constraints=0:0' | FileCheck %s

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// Both are needed on m3: better than m1, where the input is needed and the output can be.
// CHECK-LABEL: func @both_needed(%arg0: !mpmd.mesh_tensor<"m3"
func.func @both_needed(%a: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1", "m3">}) -> tensor<4xf32>
    attributes {topology = #topology} {
  // CHECK-NEXT: %[[U:.*]] = mpmd.unassign {origin = "io_constraint_in"} %arg0
  // CHECK-NEXT: %[[S:.*]] = stablehlo.negate %[[U]]
  // CHECK-NEXT: %[[R:.*]] = mpmd.assign {origin = "io_constraint_out"} %[[S]]
  // CHECK-NEXT: return %[[R]] : !mpmd.mesh_tensor<"m3"
  %0 = stablehlo.negate %a {mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m3">, mpmd.use_set = #mpmd.meshes_with_origins<"m3">} : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// The input follows the output where the user has put that.
// CHECK-LABEL: func @output_is_assigned(%arg0: !mpmd.mesh_tensor<"m2"
func.func @output_is_assigned(%a: tensor<4xf32>) -> !m2 attributes {topology = #topology} {
  %0 = mpmd.assign %a : (tensor<4xf32>) -> !m2
  return %0 : !m2
}

// A mesh only for a broadcast is the last choice.
// CHECK-LABEL: func @broadcast_last(%arg0: !mpmd.mesh_tensor<"m2"
func.func @broadcast_last(%a: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1"["broadcast_in"], "m2"["f"]>}) -> tensor<4xf32>
    attributes {topology = #topology} {
  %0 = stablehlo.negate %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// No mesh fits both: enforce-input-output-equisharding will transfer.
// CHECK-LABEL: func @no_mesh(%arg0: tensor<4xf32>
func.func @no_mesh(%a: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1">}) -> tensor<4xf32>
    attributes {topology = #topology} {
  // CHECK-NOT: assign
  // CHECK: return
  %0 = stablehlo.negate %a {mpmd.src_set = #mpmd.meshes_with_origins<"m2">} : tensor<4xf32>
  return %0 : tensor<4xf32>
}

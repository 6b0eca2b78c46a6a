// RUN: mpmd-opt %s -mpmd-infer-mesh-populate-use-set | FileCheck %s --implicit-check-not=use_set

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// The newest use comes first; a use inside of a region is one by the op around it.
// CHECK-LABEL: func @uses
// CHECK-SAME: %arg0: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m2"["g"], "m1"["f"]>}
// CHECK-SAME: %arg1: tensor<i32> {mpmd.use_set = #mpmd.meshes_with_origins<"m2"["g"]>}
func.func @uses(%a: tensor<4xf32>, %i: tensor<i32>) -> (!m1, !m2) attributes {topology = #topology} {
  %0 = stablehlo.negate %a : tensor<4xf32> // CHECK: negate {{.*}}use_set = #mpmd.meshes_with_origins<"m2"["g"], "m1"["f"]>
  %x = mpmd.assign {origin = "f"} %0 : (tensor<4xf32>) -> !m1 // CHECK: assign {{.*}}use_set = #mpmd.meshes_with_origins<"m1"["f"]>
  // CHECK: stablehlo.case
  %1 = "stablehlo.case"(%i) ({
    %2 = stablehlo.add %0, %a : tensor<4xf32>
    stablehlo.return %2 : tensor<4xf32>
  }, {
    stablehlo.return %a : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32> // CHECK: }) {mpmd.use_set = #mpmd.meshes_with_origins<"m2"["g"]>}
  %y = mpmd.assign {origin = "g"} %1 : (tensor<4xf32>) -> !m2 // CHECK: assign {{.*}}use_set = #mpmd.meshes_with_origins<"m2"["g"]>
  return %x, %y : !m1, !m2
}

// Uses do not flow through a broadcast, but through a broadcast of a broadcast.
// CHECK-LABEL: func @broadcast
func.func @broadcast(%a: tensor<4xf32>) -> !m2 attributes {topology = #topology} {
  %0 = stablehlo.negate %a : tensor<4xf32> // CHECK: negate
  %1 = mpmd.broadcast %0 : tensor<4xf32> // CHECK: broadcast {mpmd.use_set = #mpmd.meshes_with_origins<"m2">}
  %2 = mpmd.broadcast %1 : tensor<4xf32> // CHECK: broadcast {mpmd.use_set = #mpmd.meshes_with_origins<"m2">}
  %x = mpmd.assign %2 : (tensor<4xf32>) -> !m2 // CHECK: assign {{.*}}use_set = #mpmd.meshes_with_origins<"m2">
  return %x : !m2
}

// A call is as if it were inlined; a chain of calls is followed until nothing changes.
// CHECK-LABEL: func @calls
// CHECK-SAME: %arg0: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1", "m2">}
// CHECK-SAME: %arg1: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1", "m2">}
func.func @calls(%a: tensor<4xf32>, %b: tensor<4xf32>) -> !m1 attributes {topology = #topology} {
  %0:2 = mpmd.call @swap(%a, %b) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %1:2 = mpmd.call @swap(%0#0, %0#1) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %x = mpmd.assign %1#0 : (tensor<4xf32>) -> !m1 // CHECK: assign {{.*}}use_set = #mpmd.meshes_with_origins<"m1">
  return %x : !m1
}

// CHECK: func private @swap
// CHECK-SAME: %arg0: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1", "m2">}
// CHECK-SAME: %arg1: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1", "m2">}
// CHECK-SAME: -> (tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1", "m2">}, tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1", "m2">})
func.func private @swap(%p: tensor<4xf32>, %q: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #topology} {
  %x = mpmd.assign %q : (tensor<4xf32>) -> !m2 // CHECK: assign {{.*}}use_set = #mpmd.meshes_with_origins<"m2">
  return %q, %p : tensor<4xf32>, tensor<4xf32>
}

// CHECK-LABEL: func @nothing_is_assigned(%arg0: tensor<4xf32>)
func.func @nothing_is_assigned(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %0 = stablehlo.negate %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}

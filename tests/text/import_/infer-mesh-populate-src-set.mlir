// RUN: mpmd-opt %s -mpmd-infer-mesh-populate-src-set | FileCheck %s --implicit-check-not=src_set --implicit-check-not=mpmd.reduce

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// Where it was made, and where it is transferred to; an op can be where all its operands can.
// CHECK-LABEL: func @transferred
func.func @transferred(%a: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, !m2) attributes {topology = #topology} {
  // CHECK: mpmd.assign
  // CHECK-NEXT: mpmd.fragment
  %x = mpmd.assign %a : (tensor<4xf32>) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2 // CHECK: transfer
  %u = mpmd.unassign {origin = "f"} %f : (!m1) -> tensor<4xf32> // CHECK: unassign {{.*}}src_set = #mpmd.meshes_with_origins<"m1"["f"], "m2"["transfer"]>
  %v = mpmd.unassign %t : (!m2) -> tensor<4xf32> // CHECK: unassign {{.*}}src_set = #mpmd.meshes_with_origins<"m2">
  %c = stablehlo.constant dense<1.0> : tensor<4xf32> // CHECK: constant
  %0 = stablehlo.subtract %u, %c : tensor<4xf32> // CHECK: subtract {{.*}}src_set = #mpmd.meshes_with_origins<"m1"["f"], "m2"["transfer"]>
  %1 = stablehlo.subtract %0, %v : tensor<4xf32> // CHECK: subtract {{.*}}src_set = #mpmd.meshes_with_origins<"m2"["transfer"]>
  return %0, %1, %t : tensor<4xf32>, tensor<4xf32>, !m2
}

// Arguments of the program can be wherever they are needed.
// CHECK-LABEL: func @argument
// CHECK-SAME: %arg0: tensor<4xf32> {mpmd.src_set = #mpmd.meshes_with_origins<"m2"["inferred_in"]>, mpmd.use_set
func.func @argument(%a: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m2"["f"]>}) -> tensor<4xf32>
    attributes {topology = #topology} {
  %0 = stablehlo.negate %a : tensor<4xf32> // CHECK: negate {{.*}}src_set = #mpmd.meshes_with_origins<"m2"["inferred_in"]>
  return %0 : tensor<4xf32>
}

// A scalar can be anywhere, such as the scale of a loss by which gradients of all meshes are divided.
// CHECK-LABEL: func @scalar
// CHECK-SAME: %arg0: tensor<f32> {mpmd.use_set
func.func @scalar(%a: tensor<f32> {mpmd.use_set = #mpmd.meshes_with_origins<"m2"["f"]>}) -> tensor<f32>
    attributes {topology = #topology} {
  %0 = stablehlo.negate %a : tensor<f32> // CHECK: negate
  return %0 : tensor<f32>
}

// A sum of values that can nowhere be together is one across meshes, a difference is impossible.
// CHECK-LABEL: func @conflicts
func.func @conflicts(%a: !m1, %b: !m2, %c: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<f32>)
    attributes {topology = #topology} {
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32> // CHECK: unassign {{.*}}src_set = #mpmd.meshes_with_origins<"m1">
  %v = mpmd.unassign %b : (!m2) -> tensor<4xf32> // CHECK: unassign {{.*}}src_set = #mpmd.meshes_with_origins<"m2">
  %0 = stablehlo.subtract %u, %v : tensor<4xf32> // CHECK: subtract {{.*}}{mpmd.src_set = #mpmd.meshes_with_origins<>}
  %1 = stablehlo.add %u, %v : tensor<4xf32> // CHECK: add {{.*}}{mpmd.reduce = #mpmd.reduction<add>, mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">}
  %2 = stablehlo.add %1, %u : tensor<4xf32> // CHECK: add {{.*}}{mpmd.reduce = #mpmd.reduction<add>, mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">}
  %3 = stablehlo.maximum %1, %u : tensor<4xf32> // CHECK: maximum {{.*}}{mpmd.src_set = #mpmd.meshes_with_origins<"m1">}
  %s = stablehlo.reshape %u : (tensor<4xf32>) -> tensor<1x4xf32> // CHECK: reshape {{.*}}src_set = #mpmd.meshes_with_origins<"m1">
  %t = stablehlo.reshape %v : (tensor<4xf32>) -> tensor<1x4xf32> // CHECK: reshape {{.*}}src_set = #mpmd.meshes_with_origins<"m2">
  // CHECK: concatenate {{.*}}{mpmd.reduce = #mpmd.reduction<min>, mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">}
  %4 = "stablehlo.concatenate"(%s, %t) <{dimension = 0 : i64}> : (tensor<1x4xf32>, tensor<1x4xf32>) -> tensor<2x4xf32>
  %c0 = stablehlo.constant dense<0.0> : tensor<f32>
  // CHECK: stablehlo.reduce{{.*}}{mpmd.reduce = #mpmd.reduction<min>, mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">}
  %5 = stablehlo.reduce(%4 init: %c0) applies stablehlo.minimum across dimensions = [0] : (tensor<2x4xf32>, tensor<f32>) -> tensor<4xf32>
  // CHECK: stablehlo.reduce{{.*}}{mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">}
  %6 = stablehlo.reduce(%5 init: %c0) applies stablehlo.minimum across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  return %2, %3, %6 : tensor<4xf32>, tensor<4xf32>, tensor<f32>
}

// An op with regions can be where what they capture can.
// CHECK-LABEL: func @captured
func.func @captured(%a: !m1, %which: tensor<i32>) -> tensor<4xf32> attributes {topology = #topology} {
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32> // CHECK: unassign {{.*}}src_set = #mpmd.meshes_with_origins<"m1">
  // CHECK: stablehlo.case
  // CHECK: }) {mpmd.src_set = #mpmd.meshes_with_origins<"m1">}
  %0 = "stablehlo.case"(%which) ({
    stablehlo.return %u : tensor<4xf32>
  }, {
    %1 = stablehlo.negate %u : tensor<4xf32>
    stablehlo.return %1 : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// An argument of a callee can be where all calls can give it.
// CHECK-LABEL: func @caller
func.func @caller(%a: !m1, %b: !m2) -> (tensor<4xf32>, tensor<4xf32>) attributes {topology = #topology} {
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32> // CHECK: unassign {{.*}}src_set = #mpmd.meshes_with_origins<"m1">
  %v = mpmd.unassign %b : (!m2) -> tensor<4xf32> // CHECK: unassign {{.*}}src_set = #mpmd.meshes_with_origins<"m2">
  %0:2 = mpmd.call @callee(%u, %u) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %1:2 = mpmd.call @callee(%u, %v) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %1#0, %1#1 : tensor<4xf32>, tensor<4xf32>
}

// CHECK: func private @callee(%arg0: tensor<4xf32> {mpmd.src_set = #mpmd.meshes_with_origins<"m1">}, %arg1: tensor<4xf32> {mpmd.src_set = #mpmd.meshes_with_origins<>})
func.func private @callee(%p: tensor<4xf32>, %q: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #topology} {
  %0 = stablehlo.negate %p : tensor<4xf32> // CHECK: negate {{.*}}src_set = #mpmd.meshes_with_origins<"m1">
  return %0, %q : tensor<4xf32>, tensor<4xf32>
}

// Values on meshes need no set, and a constant can be anywhere.
// CHECK-LABEL: func @on_meshes
func.func @on_meshes(%a: !m1) -> (!m1, tensor<4xf32>) attributes {topology = #topology} {
  // CHECK-NEXT: stablehlo.constant dense
  // CHECK-NEXT: mpmd.fragment
  %c = stablehlo.constant dense<1.0> : tensor<4xf32>
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %c : !m1, tensor<4xf32>
}

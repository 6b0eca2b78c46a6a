// RUN: mpmd-opt %s -mpmd-infer-mesh-finalize | FileCheck %s
// RUN: mpmd-opt %s -mpmd-infer-mesh-finalize='infer-transfers=true' | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m10 = !mpmd.mesh_tensor<"m10", tensor<4xf32>>
!h1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="pinned_host">
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m10" : <["x"=2]>>>

// An argument is on the first mesh, by string, of those that need it; the others are reached in mesh order.
// CHECK-LABEL: func @argument(%arg0: !mpmd.mesh_tensor<"m10", tensor<4xf32>>)
func.func @argument(%a: tensor<4xf32>) -> (!m2, !m10) attributes {topology = #topology} {
  // CHECK-NEXT: %[[T:.*]] = mpmd.transfer %arg0 : {{.*}}"m10"{{.*}} -> {{.*}}"m2"
  // CHECK-NEXT: return %[[T]], %arg0
  %0 = mpmd.assign %a : (tensor<4xf32>) -> !m2
  %1 = mpmd.assign %a : (tensor<4xf32>) -> !m10
  return %0, %1 : !m2, !m10
}

// A broadcast value goes from mesh to mesh.
// CHECK-LABEL: func @broadcast
func.func @broadcast(%a: !m1) -> (!m10, !m2, !m1) attributes {topology = #topology} {
  // CHECK-NEXT: %[[T2:.*]] = mpmd.transfer %arg0 {{.*}} -> {{.*}}"m2"
  // CHECK-NEXT: %[[T10:.*]] = mpmd.transfer %[[T2]] {{.*}} -> {{.*}}"m10"
  // CHECK-NEXT: return %[[T10]], %[[T2]], %arg0
  %u = mpmd.unassign {mpmd.src_set = #mpmd.meshes_with_origins<"m1">} %a : (!m1) -> tensor<4xf32>
  %b = mpmd.broadcast %u : tensor<4xf32>
  %x = mpmd.assign %b : (tensor<4xf32>) -> !m10
  %y = mpmd.assign %b : (tensor<4xf32>) -> !m2
  %z = mpmd.assign %b : (tensor<4xf32>) -> !m1
  return %x, %y, %z : !m10, !m2, !m1
}

// Reduced where the values are, then where the result is needed.
// CHECK-LABEL: func @reduce
func.func @reduce(%a: !m1, %b: !m2, %c: !m1) -> !m2 attributes {topology = #topology} {
  // CHECK:      %[[P:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%arg0, %arg2) {mpmd.inferred_by = ["infer_mesh_convert_reduce_ops"]} (%arg3: tensor<4xf32>, %arg4: tensor<4xf32>) {
  // CHECK-NEXT:   stablehlo.maximum %arg3, %arg4
  // CHECK:      %[[T:.*]] = mpmd.transfer %[[P]]
  // CHECK:      %[[R:.*]] = mpmd.fragment<mesh="m2", origin=[]> (%[[T]], %arg1)
  // CHECK-NEXT:   stablehlo.maximum
  // CHECK:      return %[[R]]
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %v = mpmd.unassign %b : (!m2) -> tensor<4xf32>
  %w = mpmd.unassign %c : (!m1) -> tensor<4xf32>
  %r = mpmd.reduce<max> %u, %v, %w : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %x = mpmd.assign %r : (tensor<4xf32>) -> !m2
  return %x : !m2
}

// Another memory of the same mesh is a transfer too.
// CHECK-LABEL: func @to_host
func.func @to_host(%a: !m1) -> !h1 attributes {topology = #topology} {
  // CHECK: mpmd.transfer
  %u = mpmd.unassign %a : (!m1) -> tensor<4xf32>
  %x = mpmd.assign %u : (tensor<4xf32>) -> !h1
  return %x : !h1
}

// A transfer that is there already is used; nothing of the analysis is left, nor dead code.
// CHECK-LABEL: func private @callee(%arg0: !mpmd.mesh_tensor<"m1", tensor<4xf32>>) ->
func.func private @callee(%p: !m1 {mpmd.src_set = #mpmd.meshes_with_origins<"m1">, mpmd.copies = array<i64: 1>}) -> (!m2, !m2)
    attributes {topology = #topology} {
  // CHECK-NEXT: %[[T:.*]] = mpmd.transfer %arg0
  // CHECK-NEXT: return %[[T]], %[[T]]
  %u = mpmd.unassign %p : (!m1) -> tensor<4xf32>
  %x = mpmd.assign {mpmd.use_set = #mpmd.meshes_with_origins<"m2">} %u : (tensor<4xf32>) -> !m2
  %t = mpmd.transfer %p : (!m1) -> !m2
  %dead = mpmd.fragment<mesh="m1", origin=[]> (%p) (%q: tensor<4xf32>) {
    mpmd.return %q : tensor<4xf32>
  } : (!m1) -> !m1
  return %x, %t : !m2, !m2
}

// What inference noted goes everywhere, inside of fragments too.
// CHECK-LABEL: func @notes
// CHECK-NOT:   mpmd.use_set
// CHECK-NOT:   mpmd.src_set
// CHECK:       return
func.func @notes(%a: !m1 {mpmd.use_set = #mpmd.meshes_with_origins<"m1">}) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p {mpmd.use_set = #mpmd.meshes_with_origins<"m1">} : tensor<4xf32>
    %1 = stablehlo.abs %0 {mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">} : tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// RUN: mpmd-opt %s -mpmd-offload-residuals -split-input-file | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// To the host behind f, and back before each of its readers, which no longer place it; three fragments later.

// CHECK-LABEL: func.func public @main
// CHECK:       %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK-NOT:   annotate_device_placement
// CHECK:       %[[H:.*]] = mpmd.transfer %[[F]] : {{.*}} -> !mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="pinned_host">
// CHECK:       origin=["k"]
// CHECK:       origin=["k"]
// CHECK:       %[[B:.*]] = mpmd.transfer %[[H]]
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["g"]> (%[[B]])
// CHECK-NOT:   annotate_device_placement
// CHECK:       %[[C:.*]] = mpmd.transfer %[[H]]
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["g"]> (%[[C]])
// CHECK-NOT:   annotate_device_placement
func.func public @main(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.tanh %p : tensor<4xf32>
    %1 = stablehlo.custom_call @annotate_device_placement(%0) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["k"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %l = mpmd.fragment<mesh="m1", origin=["k"]> (%k) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @annotate_device_placement(%p) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @annotate_device_placement(%p) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  return %g, %h : !m1, !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// Read by the second next fragment, before which it would be back at once: it stays, without the placements.

// CHECK-LABEL: func.func public @soon
// CHECK-NOT:   mpmd.transfer
// CHECK-NOT:   annotate_device_placement
// CHECK:       return {{.*}} : !mpmd.mesh_tensor
func.func public @soon(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @annotate_device_placement(%p) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["k"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @annotate_device_placement(%p) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// A pair within a fragment is the compiler's, unless the platform does not follow it; what is returned is the user's.

// CHECK-LABEL: func.func public @within
// CHECK-COUNT-2: annotate_device_placement
// CHECK:       origin=["g"]
// CHECK-NOT:   annotate_device_placement
// CHECK:       origin=["r"]
// CHECK-COUNT-1: annotate_device_placement
// CHECK-NOT:   mpmd.transfer
func.func public @within(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @annotate_device_placement(%p) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}} : (tensor<4xf32>) -> tensor<4xf32>
    %1 = stablehlo.custom_call @annotate_device_placement(%0) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @annotate_device_placement(%p) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}, mpmd.advisory} : (tensor<4xf32>) -> tensor<4xf32>
    %1 = stablehlo.custom_call @annotate_device_placement(%0) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}, mpmd.advisory} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (!m1) -> !m1
  %r = mpmd.fragment<mesh="m1", origin=["r"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @annotate_device_placement(%p) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  return %g, %r : !m1, !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// Something is computed on the host, perhaps from what f placed there: nothing changes.

// CHECK-LABEL: func.func public @computed_there
// CHECK-NOT:   mpmd.transfer
// CHECK:       annotate_device_placement
func.func public @computed_there(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @annotate_device_placement(%p) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m1", origin=["k"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %l = mpmd.fragment<mesh="m1", origin=["k"]> (%k) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%p: tensor<4xf32>) {
    %0 = stablehlo.add %p, %p {mhlo.frontend_attributes = {_xla_compute_type = "host"}} : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

// RUN: mpmd-opt %s -mpmd-mark-offloaded-input-output -split-input-file -verify-diagnostics | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// From the argument to the fragment; from f's result, computed on the host inside of a loop, to g; and what is
// returned is where the function says. Device is the same as nothing.

// CHECK-LABEL: func.func public @main
// CHECK:       origin=["f"]> {{.*}} {arg_attrs = [{mhlo.memory_kind = "pinned_host"}, {}], res_attrs = [{mhlo.memory_kind = "pinned_host"}, {}]}
// CHECK:       origin=["g"]> {{.*}} {arg_attrs = [{mhlo.memory_kind = "pinned_host"}], res_attrs = [{}]}
func.func public @main(%a: !m1 {mhlo.memory_kind = "pinned_host"}, %b: !m1) -> (!m1 {mhlo.memory_kind = "pinned_host"}, !m1, !m1 {mhlo.memory_kind = "device"}) attributes {topology = #topology} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %0:2 = stablehlo.while(%i = %p, %j = %q) : tensor<4xf32>, tensor<4xf32>
      cond {
      %c = stablehlo.constant dense<false> : tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %1 = stablehlo.add %i, %j {mhlo.frontend_attributes = {_xla_compute_type = "host"}} : tensor<4xf32>
      %2 = stablehlo.reshape %1 : (tensor<4xf32>) -> tensor<1x4xf32>
      %3 = stablehlo.reshape %2 : (tensor<1x4xf32>) -> tensor<4xf32>
      stablehlo.return %3, %j : tensor<4xf32>, tensor<4xf32>
    }
    mpmd.return %0#0, %0#1 : tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1) -> (!m1, !m1)
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f#0) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @annotate_device_placement(%p) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  return %f#0, %f#1, %g : !m1, !m1, !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

func.func public @on_the_host(
    // expected-error@+1 {{Memory kind mismatch between users of arg 0: <<NULL ATTRIBUTE>> vs "pinned_host"}}
    %a: !m1 {mhlo.memory_kind = "pinned_host"}) -> (!m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m1
  // expected-error@+1 {{Memory kind mismatch between result 1 and defining op: <<NULL ATTRIBUTE>> vs "pinned_host"}}
  return %t, %a : !m1, !m1
}

// -----

// All is on the device, said or not, and was marked before.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @on_the_device
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["f"]> (%arg0, %arg1) {arg_attrs = [{}, {}], res_attrs = [{}]} (
func.func public @on_the_device(%a: !m1 {mhlo.memory_kind = "device"}, %b: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b) {arg_attrs = [{}, {}], res_attrs = [{}]} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %f : !m1
}

// -----

// A value of another shape is not the one that the host computed.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m1_square = !mpmd.mesh_tensor<"m1", tensor<2x2xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @reshaped
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) {arg_attrs = [{}], res_attrs = [{}]} (
func.func public @reshaped(%a: !m1) -> !m1_square attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.add %p, %p {mhlo.frontend_attributes = {_xla_compute_type = "host"}} : tensor<4xf32>
    %1 = stablehlo.reshape %0 : (tensor<4xf32>) -> tensor<2x2xf32>
    mpmd.return %1 : tensor<2x2xf32>
  } : (!m1) -> !m1_square
  return %f : !m1_square
}

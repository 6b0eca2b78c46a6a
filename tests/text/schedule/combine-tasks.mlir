// RUN: mpmd-opt %s -mpmd-combine-tasks='orders=m1:0F0,0F1+0B0,0B1' -split-input-file -verify-diagnostics | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// The forward of one microbatch and the backward of another are one program, in their place among the others. A
// result of the forward is there for another mesh when both are done.

// CHECK-LABEL: func.func public @main
// CHECK:      %[[F0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) {{.*}}call_counter = 0
// CHECK:      %[[BOTH:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f", "f"(1)]> (%arg0, %[[F0]])
// CHECK-NEXT:   %[[ADD:.*]] = stablehlo.add
// CHECK-NEXT:   %[[NEG:.*]] = stablehlo.negate
// CHECK-NEXT:   mpmd.return %[[ADD]], %[[NEG]]
// CHECK:      mpmd.transfer %[[BOTH]]#0
// CHECK:      mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[BOTH]]#0) {{.*}}call_counter = 1
func.func public @main(%a: !m1) -> (!m2, !m1, !m1) attributes {topology = #topology} {
  %f0 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    %x = stablehlo.add %p, %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f1 : (!m1) -> !m2
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f0) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    %x = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f1) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %t, %b0, %b1 : !m2, !m1, !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// Without one of the two there is nothing to combine.

// CHECK-LABEL: func.func public @one_alone
// CHECK: mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) {{.*}}call_counter = 1
func.func public @one_alone(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f1 : !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @reads_the_other
// CHECK: origin=["f"]> (%arg0)
// CHECK: origin=["f"(1)]>
func.func public @reads_the_other(%a: !m1) -> !m1 attributes {topology = #topology} {
  // expected-warning@+1 {{(fragment "f" on mesh "m1", microbatch 1) and (fragment "f"(1) on mesh "m1", microbatch 0) are not one program, as the schedule has it: one waits for the other}}
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%f1) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %b0 : !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func.func public @waits_through_another_mesh
// CHECK: origin=["f"]> (%arg0)
// CHECK: origin=["g"]>
// CHECK: origin=["f"(1)]>
func.func public @waits_through_another_mesh(%a: !m1) -> !m1 attributes {topology = #topology} {
  // expected-warning@+1 {{are not one program, as the schedule has it: one waits for the other}}
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f1 : (!m1) -> !m2
  %g = mpmd.fragment<mesh="m2", origin=["g"]> (%t) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %u = mpmd.transfer %g : (!m2) -> !m1
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%u) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %b0 : !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// No value of one reaches the other, but m2 runs what reads the forward before what the backward reads.

// CHECK-LABEL: func.func public @waits_for_the_order_of_another_mesh
// CHECK: origin=["f"]> (%arg0)
// CHECK: origin=["f"(1)]>
func.func public @waits_for_the_order_of_another_mesh(%a: !m1, %c: !m2) -> (!m1, !m2)
    attributes {topology = #topology} {
  // expected-warning@+1 {{are not one program, as the schedule has it: one waits for the other}}
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f1 : (!m1) -> !m2
  %g1 = mpmd.fragment<mesh="m2", origin=["g"]> (%t) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %g0 = mpmd.fragment<mesh="m2", origin=["g"(1)]> (%c) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m2) -> !m2
  %u = mpmd.transfer %g0 : (!m2) -> !m1
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%u) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %b0, %g1 : !m1, !m2
}

// RUN: mpmd-opt %s -mpmd-split-bwd-fragments='between-stages=true' | FileCheck %s
// RUN: mpmd-opt %s -mpmd-split-bwd-fragments | FileCheck %s --check-prefix=ALONE

// Stage 1 waits for stage 2 of the same mesh, so stage 2 is split; the update, which is no backward work, waits
// for nothing of stage 1.

!m = !mpmd.mesh_tensor<"m", tensor<4xf32>>
#topology = #mpmd.topology<<"m" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK: %[[DX:.*]]:2 = mpmd.fragment<mesh="m", origin=["f"(1)], stage=2> {{.*}}split_keep_transferred
// CHECK-NEXT: stablehlo.negate
// CHECK: mpmd.fragment<mesh="m", origin=["f"(1)], stage=2> {{.*}}split_drop_transferred
// CHECK-NEXT: stablehlo.tanh
// CHECK: mpmd.fragment<mesh="m", origin=["g"(1)], stage=1> (%[[DX]]#0)
// CHECK-NOT: split
// ALONE-LABEL: func.func public @main(
// ALONE-NOT: split
func.func public @main(%g: !m) -> (!m, !m, !m) attributes {topology = #topology} {
  %dw, %dx = mpmd.fragment<mesh="m", origin=["f"(1)], stage=2> (%g) (%g_: tensor<4xf32>) {
    %s = stablehlo.negate %g_ : tensor<4xf32>
    %b = stablehlo.tanh %s : tensor<4xf32>
    mpmd.return %b, %s : tensor<4xf32>, tensor<4xf32>
  } : (!m) -> (!m, !m)
  %r:2 = mpmd.fragment<mesh="m", origin=["g"(1)], stage=1> (%dx) (%g_: tensor<4xf32>) {
    %s = stablehlo.negate %g_ : tensor<4xf32>
    %b = stablehlo.tanh %s : tensor<4xf32>
    mpmd.return %b, %s : tensor<4xf32>, tensor<4xf32>
  } : (!m) -> (!m, !m)
  %u = mpmd.fragment<mesh="m", origin=["update"]> (%r#1) (%g_: tensor<4xf32>) {
    %s = stablehlo.abs %g_ : tensor<4xf32>
    mpmd.return %s : tensor<4xf32>
  } : (!m) -> !m
  return %dw, %r#0, %u : !m, !m, !m
}

// What is sent to the end of the step is not waited for; what is sent to another microbatch's work is.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

// CHECK-LABEL: func.func public @two_meshes(
// CHECK: mpmd.fragment<mesh="m2", origin=["f"(1)], stage=1> {{.*}}split_keep_transferred
// CHECK-NEXT: stablehlo.negate
// CHECK-NEXT: mpmd.return
// CHECK: mpmd.fragment<mesh="m2", origin=["f"(1)], stage=1> {{.*}}split_drop_transferred
func.func public @two_meshes(%g: !m2) -> (!m1, !m1)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  %dw, %dx = mpmd.fragment<mesh="m2", origin=["f"(1)], stage=1> (%g) {call_counter = 0 : ui32} (%g_: tensor<4xf32>) {
    %s = stablehlo.negate %g_ : tensor<4xf32>
    %b = stablehlo.tanh %s : tensor<4xf32>
    mpmd.return %b, %s : tensor<4xf32>, tensor<4xf32>
  } : (!m2) -> (!m2, !m2)
  %t = mpmd.transfer %dx : (!m2) -> !m1
  %sum = mpmd.transfer %dw : (!m2) -> !m1
  %r = mpmd.fragment<mesh="m1", origin=["g"(1)], stage=0> (%t) {call_counter = 0 : ui32} (%g_: tensor<4xf32>) {
    %s = stablehlo.tanh %g_ : tensor<4xf32>
    mpmd.return %s : tensor<4xf32>
  } : (!m1) -> !m1
  return %r, %sum : !m1, !m1
}

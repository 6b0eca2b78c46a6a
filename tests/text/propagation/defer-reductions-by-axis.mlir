// RUN: mpmd-opt %s -mpmd-defer-reductions='per-microbatch=fsdp' | FileCheck %s

// Over "fsdp" the devices add in each microbatch what they add over "replica" at the end; the total may be split
// as its reader likes.  A scalar cannot be split, and waits.

sdy.mesh @mesh = <["replica"=2, "fsdp"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
!l = !mpmd.mesh_tensor<"m1", tensor<f32>>
#topology = #mpmd.topology<<"m1" : <["replica"=2, "fsdp"=2]>>>

// CHECK-LABEL: func.func public @by_axis
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)], {{.*}} out_shardings=[<@mesh, [{"replica"}, {?}, {?}]>, <@mesh, [{"replica", "fsdp"}]>]>{{.*}} {call_counter = 0
// CHECK:           %[[TERMS:.*]] = stablehlo.dot_general {{.*}} -> tensor<4x4x4xf32>
// CHECK:           %[[APART:.*]] = stablehlo.reshape %[[TERMS]] : (tensor<4x4x4xf32>) -> tensor<2x2x4x4xf32>
// CHECK:           %[[SPLIT:.*]] = sdy.sharding_constraint %[[APART]] <@mesh, [{"replica"}, {"fsdp"}, {}, {}]>
// CHECK:           %[[SUM:.*]] = stablehlo.reduce(%[[SPLIT]] init: %{{.*}}) applies stablehlo.add across dimensions = [1] {mpmd.reduces_terms} : (tensor<2x2x4x4xf32>, tensor<f32>) -> tensor<2x4x4xf32>
// CHECK:           stablehlo.add %{{.*}}, %{{.*}} : tensor<2x4x4xf32>
// CHECK:         {mpmd.inferred_by = ["defer_reductions"]} (%{{.*}}: tensor<2x4x4xf32>, %{{.*}}: tensor<4xf32>
func.func public @by_axis(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"replica", "fsdp"}, {}]>}, %z: !w, %o: !l) -> (!w, !l) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %b0, %l0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %z, %o) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>, %r: tensor<f32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %2 = stablehlo.reduce(%p init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
    %3 = stablehlo.add %r, %2 : tensor<f32>
    mpmd.return %1, %3 : tensor<4x4xf32>, tensor<f32>
  } : (!x, !w, !l) -> (!w, !l)
  %b1, %l1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0, %l0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>, %r: tensor<f32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %2 = stablehlo.reduce(%p init: %zero) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
    %3 = stablehlo.add %r, %2 : tensor<f32>
    mpmd.return %1, %3 : tensor<4x4xf32>, tensor<f32>
  } : (!x, !w, !l) -> (!w, !l)
  return %b1, %l1 : !w, !l
}

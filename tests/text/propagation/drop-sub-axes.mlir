// RUN: mpmd-opt %s -mpmd-drop-sub-axes | FileCheck %s

// A dim ends before the first part of an axis; whole axes stay, and so does the inside of a fragment.

!m1 = !mpmd.mesh_tensor<"m1", tensor<8x8xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<8x8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=4, "y"=2]>>, <"m2" : <["x"=4, "y"=2]>>>
sdy.mesh @mesh = <["x"=4, "y"=2]>

// CHECK-LABEL: func.func public @main
// CHECK: in_shardings=[<@mesh, [{}, {"y"}]>], out_shardings=[<@mesh, [{"y"}, {}]>]
// CHECK: sdy.sharding_constraint %{{.*}} <@mesh, [{"x":(1)2}, {}]>
// CHECK: mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {"y"}]>]>}
func.func public @main(%a: !m1) -> !m2 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], in_shardings=[<@mesh, [{"x":(1)2}, {"y"}]>], out_shardings=[<@mesh, [{"y", "x":(2)2}, {}]>]> (%a) (%p: tensor<8x8xf32>) {
    %x = sdy.sharding_constraint %p <@mesh, [{"x":(1)2}, {}]> : tensor<8x8xf32>
    mpmd.return %x : tensor<8x8xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x":(1)2}, {"y"}]>]>} %f : (!m1) -> !m2
  return %t : !m2
}

// Whole axes, two of them on one dim.

// CHECK-LABEL: func.func public @whole_axes
// CHECK: in_shardings=[<@mesh, [{"x", "y"}, {}]>], out_shardings=[<@mesh, [{?}, {"x"}]>]
func.func public @whole_axes(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], in_shardings=[<@mesh, [{"x", "y"}, {}]>], out_shardings=[<@mesh, [{?}, {"x"}]>]> (%a) (%p: tensor<8x8xf32>) {
    mpmd.return %p : tensor<8x8xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

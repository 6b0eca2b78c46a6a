// RUN: mpmd-opt %s -mpmd-lower-gathers -split-input-file | FileCheck %s

// A weight is gathered over the axis that no longer splits it, and not between replicas; one that stays split by
// an axis outside of it keeps this part.

sdy.mesh @mesh = <["replica"=2, "fsdp"=2]>
!s = !mpmd.mesh_tensor<"m1", tensor<4x8xf32>, sharding=<@mesh, [{"fsdp"}, {}]>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x8xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<4x8xf32>, sharding=<@mesh, [{}, {"replica", "fsdp"}]>>
!p = !mpmd.mesh_tensor<"m1", tensor<4x8xf32>, sharding=<@mesh, [{}, {"replica"}]>>
#topology = #mpmd.topology<<"m1" : <["replica"=2, "fsdp"=2]>>>

// CHECK-LABEL: func.func public @over_one_axis
// CHECK:         %[[W:.*]]:2 = sdy.manual_computation({{.*}}) in_shardings=[<@mesh, [{"fsdp"}, {}]>, <@mesh, [{}, {"replica", "fsdp"}]>] out_shardings=[<@mesh, [{}, {}]>, <@mesh, [{}, {"replica"}]>] manual_axes={"replica", "fsdp"}
// CHECK-SAME:      (%[[A:.*]]: tensor<2x8xf32>, %[[B:.*]]: tensor<4x2xf32>)
// CHECK:         "stablehlo.all_gather"(%[[A]])
// CHECK-SAME:      all_gather_dim = 0
// CHECK-SAME{LITERAL}: replica_groups = dense<[[0, 1], [2, 3]]>
// CHECK-SAME:      (tensor<2x8xf32>) -> tensor<4x8xf32>
// CHECK:         "stablehlo.all_gather"(%[[B]])
// CHECK-SAME:      all_gather_dim = 1
// CHECK-SAME{LITERAL}: replica_groups = dense<[[0, 1], [2, 3]]>
// CHECK:         mpmd.return %[[W]]#0, %[[W]]#1
func.func public @over_one_axis(%a: !s, %b: !b) -> (!w, !p) attributes {topology = #topology} {
  %g:2 = mpmd.fragment<mesh="m1", origin=[]> (%a, %b) {mpmd.inferred_by = ["hoist_gathers"]} (%x: tensor<4x8xf32>, %y: tensor<4x8xf32>) {
    mpmd.return %x, %y : tensor<4x8xf32>, tensor<4x8xf32>
  } : (!s, !b) -> (!w, !p)
  return %g#0, %g#1 : !w, !p
}

// -----

// Over two axes of one dim: the inner one first.

sdy.mesh @mesh = <["x"=2, "y"=2]>
!s = !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"x", "y"}]>>
!w = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>>

// CHECK-LABEL: func.func public @over_two_axes
// CHECK:         %[[Y:.*]] = "stablehlo.all_gather"(%{{[a-z0-9]+}})
// CHECK-SAME{LITERAL}: replica_groups = dense<[[0, 1], [2, 3]]>
// CHECK-SAME:      (tensor<2xf32>) -> tensor<4xf32>
// CHECK-NEXT:    "stablehlo.all_gather"(%[[Y]])
// CHECK-SAME{LITERAL}: replica_groups = dense<[[0, 2], [1, 3]]>
// CHECK-SAME:      (tensor<4xf32>) -> tensor<8xf32>
func.func public @over_two_axes(%a: !s) -> !w attributes {topology = #topology} {
  %g = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["hoist_gathers"]} (%x: tensor<8xf32>) {
    mpmd.return %x : tensor<8xf32>
  } : (!s) -> !w
  return %g : !w
}

// -----

// The axis that stays lies within the one that goes: devices would have to exchange parts of parts.

sdy.mesh @mesh = <["x"=2, "y"=2]>
!s = !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"x", "y"}]>>
!y = !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"y"}]>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>>

// CHECK-LABEL: func.func public @an_outer_axis
// CHECK-NOT:     manual_computation
func.func public @an_outer_axis(%a: !s) -> !y attributes {topology = #topology} {
  %g = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["hoist_gathers"]} (%x: tensor<8xf32>) {
    mpmd.return %x : tensor<8xf32>
  } : (!s) -> !y
  return %g : !y
}

// -----

// Another fragment reshards as it likes.

sdy.mesh @mesh = <["x"=2]>
!s = !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"x"}]>>
!w = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @another_fragment
// CHECK-NOT:     manual_computation
func.func public @another_fragment(%a: !s) -> !w attributes {topology = #topology} {
  %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%x: tensor<8xf32>) {
    mpmd.return %x : tensor<8xf32>
  } : (!s) -> !w
  return %g : !w
}

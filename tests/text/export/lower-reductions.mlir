// RUN: mpmd-opt %s -mpmd-lower-reductions -split-input-file | FileCheck %s

// Sums over the terms of devices as collectives: each device gets all of a value that is whole, and its part of
// one that is split.

sdy.mesh @mesh = <["data"=2]>
!p = !mpmd.mesh_tensor<"m1", tensor<2x4x6xf32>, sharding=<@mesh, [{"data"}, {}, {}]>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x6xf32>>
!s = !mpmd.mesh_tensor<"m1", tensor<4x6xf32>, sharding=<@mesh, [{"data"}, {}]>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @whole_and_split
// CHECK:         sdy.manual_computation({{.*}}) in_shardings=[<@mesh, [{"data"}, {}, {}]>, <@mesh, [{"data"}, {}, {}]>] out_shardings=[<@mesh, [{}, {}]>, <@mesh, [{"data"}, {}]>] manual_axes={"data"}
// CHECK-SAME:      (%[[A:.*]]: tensor<1x4x6xf32>, %[[B:.*]]: tensor<1x4x6xf32>)
// CHECK:         %[[X:.*]] = stablehlo.reshape %[[A]] : (tensor<1x4x6xf32>) -> tensor<4x6xf32>
// CHECK-NEXT:    "stablehlo.all_reduce"(%[[X]])
// CHECK-SAME{LITERAL}: replica_groups = dense<[[0, 1]]>
// CHECK:         %[[Y:.*]] = stablehlo.reshape %[[B]] : (tensor<1x4x6xf32>) -> tensor<4x6xf32>
// CHECK-NEXT:    "stablehlo.reduce_scatter"(%[[Y]])
// CHECK-SAME{LITERAL}: replica_groups = dense<[[0, 1]]>
// CHECK-SAME:      scatter_dimension = 0
// CHECK:         (tensor<4x6xf32>) -> tensor<2x6xf32>
// CHECK-NOT:     stablehlo.reduce(
func.func public @whole_and_split(%a: !p, %b: !p) -> (!w, !s) attributes {topology = #topology} {
  %s:2 = mpmd.fragment<mesh="m1", origin=[]> (%a, %b) {mpmd.inferred_by = ["defer_reductions"]} (%x: tensor<2x4x6xf32>, %y: tensor<2x4x6xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<2x4x6xf32>, tensor<f32>) -> tensor<4x6xf32>
    %1 = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<2x4x6xf32>, tensor<f32>) -> tensor<4x6xf32>
    mpmd.return %0, %1 : tensor<4x6xf32>, tensor<4x6xf32>
  } : (!p, !p) -> (!w, !s)
  return %s#0, %s#1 : !w, !s
}

// -----

// A start is added to what is reduced.

sdy.mesh @mesh = <["data"=2]>
!p = !mpmd.mesh_tensor<"m1", tensor<2x4x6xf32>, sharding=<@mesh, [{"data"}, {}, {}]>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x6xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @with_a_start
// CHECK:         (%{{.*}}: tensor<2x4x6xf32>, %[[START:.*]]: tensor<4x6xf32>)
// CHECK:         %[[SUM:.*]] = sdy.manual_computation(
// CHECK:         stablehlo.add %[[START]], %[[SUM]]
func.func public @with_a_start(%a: !p, %start: !w) -> !w attributes {topology = #topology} {
  %s = mpmd.fragment<mesh="m1", origin=[]> (%a, %start) {mpmd.inferred_by = ["defer_reductions"]} (%x: tensor<2x4x6xf32>, %y: tensor<4x6xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<2x4x6xf32>, tensor<f32>) -> tensor<4x6xf32>
    %1 = stablehlo.add %y, %0 : tensor<4x6xf32>
    mpmd.return %1 : tensor<4x6xf32>
  } : (!p, !w) -> !w
  return %s : !w
}

// -----

// Terms lie along two axes: over one the value is split, over the other its parts are added.

sdy.mesh @mesh = <["data"=2, "model"=3, "fsdp"=2]>
!p = !mpmd.mesh_tensor<"m1", tensor<4x4x6xf32>, sharding=<@mesh, [{"data", "fsdp"}, {}, {"model"}]>>
!s = !mpmd.mesh_tensor<"m1", tensor<4x6xf32>, sharding=<@mesh, [{"fsdp"}, {"model"}]>>
#topology = #mpmd.topology<<"m1" : <["data"=2, "model"=3, "fsdp"=2]>>>

// CHECK-LABEL: func.func public @two_axes
// CHECK:         "stablehlo.reduce_scatter"
// CHECK-SAME{LITERAL}: replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]>
// CHECK:         (tensor<4x2xf32>) -> tensor<2x2xf32>
// CHECK:         "stablehlo.all_reduce"
// CHECK-SAME{LITERAL}: replica_groups = dense<[[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]>
// CHECK:         (tensor<2x2xf32>) -> tensor<2x2xf32>
func.func public @two_axes(%a: !p) -> !s attributes {topology = #topology} {
  %s = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["defer_reductions"]} (%x: tensor<4x4x6xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4x4x6xf32>, tensor<f32>) -> tensor<4x6xf32>
    mpmd.return %0 : tensor<4x6xf32>
  } : (!p) -> !s
  return %s : !s
}

// -----

// The value is split within the parts of another axis, which it is not while it has terms: a reshard follows.

sdy.mesh @mesh = <["data"=2, "model"=2]>
!p = !mpmd.mesh_tensor<"m1", tensor<2x8xf32>, sharding=<@mesh, [{"data"}, {"model"}]>>
!s = !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"data", "model"}]>>
#topology = #mpmd.topology<<"m1" : <["data"=2, "model"=2]>>>

// CHECK-LABEL: func.func public @outer_axis
// CHECK:         %[[SUM:.*]] = sdy.manual_computation({{.*}}) in_shardings=[<@mesh, [{"data"}, {"model"}]>] out_shardings=[<@mesh, [{"model"}]>]
// CHECK:         "stablehlo.all_reduce"
// CHECK:         sdy.sharding_constraint %[[SUM]] <@mesh, [{"data", "model"}]>
func.func public @outer_axis(%a: !p) -> !s attributes {topology = #topology} {
  %s = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["defer_reductions"]} (%x: tensor<2x8xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<2x8xf32>, tensor<f32>) -> tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!p) -> !s
  return %s : !s
}

// -----

// Left alone: a value that is split along another axis than its terms are, and work that is not a deferred sum.

sdy.mesh @mesh = <["data"=2, "model"=2]>
!p = !mpmd.mesh_tensor<"m1", tensor<2x8xf32>, sharding=<@mesh, [{"data"}, {}]>>
!s = !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"model"}]>>
!w = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2, "model"=2]>>>

// CHECK-LABEL: func.func public @left_alone
// CHECK-NOT:     manual_computation
func.func public @left_alone(%a: !p) -> (!s, !w) attributes {topology = #topology} {
  %s = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["defer_reductions"]} (%x: tensor<2x8xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<2x8xf32>, tensor<f32>) -> tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!p) -> !s
  %t = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%x: tensor<2x8xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<2x8xf32>, tensor<f32>) -> tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!p) -> !w
  return %s, %t : !s, !w
}

// -----

// A sum of a microbatch, over one of two dims of terms, in a body that fragments share: its value is split as the
// total that it is added to.

sdy.mesh @mesh = <["replica"=2, "fsdp"=2]>
!p = !mpmd.mesh_tensor<"m1", tensor<2x2x4x6xf32>, sharding=<@mesh, [{"replica"}, {"fsdp"}, {}, {}]>>
!t = !mpmd.mesh_tensor<"m1", tensor<2x4x6xf32>, sharding=<@mesh, [{"replica"}, {"fsdp"}, {}]>>
#topology = #mpmd.topology<<"m1" : <["replica"=2, "fsdp"=2]>>>

// CHECK-LABEL: func.func public @in_a_microbatch
// CHECK-LABEL: func.func private @mpmd.body.0
// CHECK:         %[[TERMS:.*]] = sdy.sharding_constraint
// CHECK:         %[[SUM:.*]] = sdy.manual_computation(%[[TERMS]]) in_shardings=[<@mesh, [{"replica"}, {"fsdp"}, {}, {}]>] out_shardings=[<@mesh, [{"replica"}, {"fsdp"}, {}]>]
// CHECK-NOT:     all_reduce
// CHECK:         "stablehlo.reduce_scatter"
// CHECK-SAME{LITERAL}: replica_groups = dense<[[0, 1], [2, 3]]>
// CHECK-NOT:     stablehlo.reduce(
// CHECK:         stablehlo.add %{{.*}}, %[[SUM]]
func.func public @in_a_microbatch(%a: !p, %b: !p, %t: !t) -> !t attributes {topology = #topology} {
  %0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a, %t) {call_counter = 0 : ui32} (%x: tensor<2x2x4x6xf32>, %y: tensor<2x4x6xf32>) {
    %1 = func.call @mpmd.body.0(%x, %y) : (tensor<2x2x4x6xf32>, tensor<2x4x6xf32>) -> tensor<2x4x6xf32>
    mpmd.return %1 : tensor<2x4x6xf32>
  } : (!p, !t) -> !t
  %2 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%b, %0) {call_counter = 1 : ui32} (%x: tensor<2x2x4x6xf32>, %y: tensor<2x4x6xf32>) {
    %1 = func.call @mpmd.body.0(%x, %y) : (tensor<2x2x4x6xf32>, tensor<2x4x6xf32>) -> tensor<2x4x6xf32>
    mpmd.return %1 : tensor<2x4x6xf32>
  } : (!p, !t) -> !t
  return %2 : !t
}
func.func private @mpmd.body.0(%x: tensor<2x2x4x6xf32>, %y: tensor<2x4x6xf32>) -> tensor<2x4x6xf32> attributes {mpmd.kept_arguments = array<i64: 0, 1>} {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %terms = sdy.sharding_constraint %x <@mesh, [{"replica"}, {"fsdp"}, {}, {}]> : tensor<2x2x4x6xf32>
  %sum = stablehlo.reduce(%terms init: %zero) applies stablehlo.add across dimensions = [1] {mpmd.reduces_terms} : (tensor<2x2x4x6xf32>, tensor<f32>) -> tensor<2x4x6xf32>
  %total = stablehlo.add %y, %sum : tensor<2x4x6xf32>
  return %total : tensor<2x4x6xf32>
}

// -----

// Totals of one body that are split in different ways: its sum stays.

sdy.mesh @mesh = <["replica"=2, "fsdp"=2]>
!p = !mpmd.mesh_tensor<"m1", tensor<2x2x4x6xf32>, sharding=<@mesh, [{"replica"}, {"fsdp"}, {}, {}]>>
!t = !mpmd.mesh_tensor<"m1", tensor<2x4x6xf32>, sharding=<@mesh, [{"replica"}, {"fsdp"}, {}]>>
!u = !mpmd.mesh_tensor<"m1", tensor<2x4x6xf32>, sharding=<@mesh, [{"replica"}, {}, {"fsdp"}]>>
#topology = #mpmd.topology<<"m1" : <["replica"=2, "fsdp"=2]>>>

// CHECK-LABEL: func.func public @split_in_two_ways
// CHECK-NOT:   manual_computation
// CHECK:       stablehlo.reduce(
func.func public @split_in_two_ways(%a: !p, %t: !t, %u: !u) -> (!t, !u) attributes {topology = #topology} {
  %0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a, %t) {call_counter = 0 : ui32} (%x: tensor<2x2x4x6xf32>, %y: tensor<2x4x6xf32>) {
    %1 = func.call @mpmd.body.0(%x, %y) : (tensor<2x2x4x6xf32>, tensor<2x4x6xf32>) -> tensor<2x4x6xf32>
    mpmd.return %1 : tensor<2x4x6xf32>
  } : (!p, !t) -> !t
  %2 = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%a, %u) {call_counter = 0 : ui32} (%x: tensor<2x2x4x6xf32>, %y: tensor<2x4x6xf32>) {
    %1 = func.call @mpmd.body.0(%x, %y) : (tensor<2x2x4x6xf32>, tensor<2x4x6xf32>) -> tensor<2x4x6xf32>
    mpmd.return %1 : tensor<2x4x6xf32>
  } : (!p, !u) -> !u
  return %0, %2 : !t, !u
}
func.func private @mpmd.body.0(%x: tensor<2x2x4x6xf32>, %y: tensor<2x4x6xf32>) -> tensor<2x4x6xf32> attributes {mpmd.kept_arguments = array<i64: 0, 1>} {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %terms = sdy.sharding_constraint %x <@mesh, [{"replica"}, {"fsdp"}, {}, {}]> : tensor<2x2x4x6xf32>
  %sum = stablehlo.reduce(%terms init: %zero) applies stablehlo.add across dimensions = [1] {mpmd.reduces_terms} : (tensor<2x2x4x6xf32>, tensor<f32>) -> tensor<2x4x6xf32>
  %total = stablehlo.add %y, %sum : tensor<2x4x6xf32>
  return %total : tensor<2x4x6xf32>
}

// -----

// So does one whose total is split along an axis that does not split the terms.

sdy.mesh @mesh = <["replica"=2, "fsdp"=2, "model"=2]>
!p = !mpmd.mesh_tensor<"m1", tensor<2x2x4x6xf32>, sharding=<@mesh, [{"replica"}, {"fsdp"}, {}, {}]>>
!t = !mpmd.mesh_tensor<"m1", tensor<2x4x6xf32>, sharding=<@mesh, [{"replica"}, {"fsdp"}, {"model"}]>>
#topology = #mpmd.topology<<"m1" : <["replica"=2, "fsdp"=2, "model"=2]>>>

// CHECK-LABEL: func.func public @split_along_another_axis
// CHECK-NOT:   manual_computation
// CHECK:       stablehlo.reduce(
func.func public @split_along_another_axis(%a: !p, %t: !t) -> !t attributes {topology = #topology} {
  %0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a, %t) {call_counter = 0 : ui32} (%x: tensor<2x2x4x6xf32>, %y: tensor<2x4x6xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %terms = sdy.sharding_constraint %x <@mesh, [{"replica"}, {"fsdp"}, {}, {}]> : tensor<2x2x4x6xf32>
    %sum = stablehlo.reduce(%terms init: %zero) applies stablehlo.add across dimensions = [1] {mpmd.reduces_terms} : (tensor<2x2x4x6xf32>, tensor<f32>) -> tensor<2x4x6xf32>
    %total = stablehlo.add %y, %sum : tensor<2x4x6xf32>
    mpmd.return %total : tensor<2x4x6xf32>
  } : (!p, !t) -> !t
  return %0 : !t
}

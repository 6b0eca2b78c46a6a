// RUN: mpmd-opt %s -mpmd-defer-reductions -split-input-file | FileCheck %s

// Two microbatches add to an accumulator that starts with zero: each device adds up its own, in an array with
// one more dim, and devices add at the end.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @from_zero
// CHECK:         %[[Z:.*]] = mpmd.fragment<mesh="m1", origin=[], out_shardings=[<@mesh, [{"data"}, {}, {}]>]> ()
// CHECK:           stablehlo.constant dense<0.000000e+00> : tensor<2x4x4xf32>
// CHECK:         %[[B0:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)], in_shardings=[<@mesh, [{?}, {?}]>, <@mesh, [{"data"}, {}, {}]>], out_shardings=[<@mesh, [{"data"}, {}, {}]>]> (%{{.*}}, %[[Z]]) {call_counter = 0
// CHECK:           %[[P:.*]] = stablehlo.reshape %{{.*}} : (tensor<8x4xf32>) -> tensor<2x4x4xf32>
// CHECK:           stablehlo.dot_general %[[P]], %{{.*}}, batching_dims = [0] x [0], contracting_dims = [1] x [1]
// CHECK:         %[[B1:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]{{.*}} (%{{.*}}, %[[B0]]) {call_counter = 1
// CHECK:         %[[S:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[B1]]) {mpmd.inferred_by = ["defer_reductions"]}
// CHECK:           stablehlo.reduce(%{{.*}} init: %{{.*}}) applies stablehlo.add across dimensions = [0]
// CHECK:         return %[[S]]
func.func public @from_zero(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}) -> !w attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %z = mpmd.fragment<mesh="m1", origin=[]> () () {
    %0 = stablehlo.constant dense<0.0> : tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : () -> !w
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %z) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  return %b1 : !w
}

// -----

// What others read of zero stays as it is.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @zero_that_others_read
// CHECK:         %[[OLD:.*]] = mpmd.fragment<mesh="m1", origin=[]> () ()
// CHECK:         %[[Z:.*]] = mpmd.fragment<mesh="m1", origin=[], out_shardings=[<@mesh, [{"data"}, {}, {}]>]> () {mpmd.inferred_by = ["start_reductions"]}
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)]{{.*}} (%{{.*}}, %[[Z]]) {call_counter = 0
// CHECK:         return %{{.*}}, %[[OLD]]
func.func public @zero_that_others_read(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}) -> (!w, !w) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %z = mpmd.fragment<mesh="m1", origin=[]> () () {
    %0 = stablehlo.constant dense<0.0> : tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : () -> !w
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %z) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  return %b1, %z : !w, !w
}

// -----

// Another start is added to the sum at the end, once.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @from_an_argument
// CHECK-SAME:    (%{{[^:]*}}: !mpmd{{[^%]*}}%[[START:[^:]*]]: !mpmd
// CHECK:         %[[Z:.*]] = mpmd.fragment<mesh="m1", origin=[], out_shardings=[<@mesh, [{"data"}, {}, {}]>]> () {mpmd.inferred_by = ["start_reductions"]}
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)]{{.*}} (%{{.*}}, %[[Z]]) {call_counter = 0
// CHECK:         %[[B1:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]{{.*}} {call_counter = 1
// CHECK:         mpmd.fragment<mesh="m1", origin=[]> (%[[B1]], %[[START]]) {mpmd.inferred_by = ["defer_reductions"]} (%{{.*}}: tensor<2x4x4xf32>, %[[ARG:.*]]: tensor<4x4xf32>)
// CHECK:           %[[SUM:.*]] = stablehlo.reduce(
// CHECK-NEXT:      stablehlo.add %[[ARG]], %[[SUM]]
func.func public @from_an_argument(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> !w attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  return %b1 : !w
}

// -----

// Each microbatch clips its gradient, which is not linear: it is whole in each.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @clipped
// CHECK-NOT:   tensor<2x4x4xf32>
// CHECK-NOT:   defer_reductions
func.func public @clipped(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> !w attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %one = stablehlo.constant dense<1.0> : tensor<4x4xf32>
    %1 = stablehlo.minimum %0, %one : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %one = stablehlo.constant dense<1.0> : tensor<4x4xf32>
    %1 = stablehlo.minimum %0, %one : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  return %b1 : !w
}

// -----

// A sum that others read between two microbatches, here after the first, is whole there.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @read_between
// CHECK-NOT:   defer_reductions
func.func public @read_between(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> (!w, !w) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  return %b0, %b1 : !w, !w
}

// -----

// A loop over layers stacks their gradients: it carries the stack of each device.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<3x4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @stacked_in_a_loop
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)]{{.*}} {call_counter = 0
// CHECK:           %[[NONE:.*]] = stablehlo.constant dense<0.000000e+00> : tensor<2x3x4x4xf32>
// CHECK:           stablehlo.while
// CHECK-SAME:        = %[[NONE]]
// CHECK:             stablehlo.dot_general %{{.*}}, %{{.*}}, batching_dims = [0] x [0]
// CHECK:             stablehlo.dynamic_update_slice %{{.*}} : (tensor<2x3x4x4xf32>, tensor<2x1x4x4xf32>,
// CHECK:         stablehlo.reduce(%{{.*}} across dimensions = [0] : (tensor<2x3x4x4xf32>, tensor<f32>)
func.func public @stacked_in_a_loop(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> !w attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<3x4x4xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %end = stablehlo.constant dense<3> : tensor<i32>
    %none = stablehlo.constant dense<0.0> : tensor<3x4x4xf32>
    %0:2 = stablehlo.while(%i = %zero, %g = %none) : tensor<i32>, tensor<3x4x4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %end, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %d = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      %e = stablehlo.reshape %d : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
      %h = stablehlo.dynamic_update_slice %g, %e, %i, %zero, %zero : (tensor<3x4x4xf32>, tensor<1x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x4x4xf32>
      %n = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %n, %h : tensor<i32>, tensor<3x4x4xf32>
    }
    %1 = stablehlo.add %q, %0#1 : tensor<3x4x4xf32>
    mpmd.return %1 : tensor<3x4x4xf32>
  } : (!x, !w) -> !w
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<3x4x4xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %end = stablehlo.constant dense<3> : tensor<i32>
    %none = stablehlo.constant dense<0.0> : tensor<3x4x4xf32>
    %0:2 = stablehlo.while(%i = %zero, %g = %none) : tensor<i32>, tensor<3x4x4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %end, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %d = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      %e = stablehlo.reshape %d : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
      %h = stablehlo.dynamic_update_slice %g, %e, %i, %zero, %zero : (tensor<3x4x4xf32>, tensor<1x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x4x4xf32>
      %n = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %n, %h : tensor<i32>, tensor<3x4x4xf32>
    }
    %1 = stablehlo.add %q, %0#1 : tensor<3x4x4xf32>
    mpmd.return %1 : tensor<3x4x4xf32>
  } : (!x, !w) -> !w
  return %b1 : !w
}

// -----

// A start that is computed, and is not zero, is added at the end.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @from_ones
// CHECK:         %[[ONES:.*]] = mpmd.fragment<mesh="m1", origin=[]> () ()
// CHECK-NEXT:      stablehlo.constant dense<1.000000e+00>
// CHECK:         mpmd.inferred_by = ["start_reductions"]
// CHECK:         mpmd.fragment<mesh="m1", origin=[]> (%{{.*}}, %[[ONES]]) {mpmd.inferred_by = ["defer_reductions"]}
func.func public @from_ones(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}) -> !w attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %o = mpmd.fragment<mesh="m1", origin=[]> () () {
    %0 = stablehlo.constant dense<1.0> : tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : () -> !w
  %b0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %o) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %b1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  return %b1 : !w
}

// -----

// A microbatch that reads the total of those before needs it whole.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @total_is_read
// CHECK-NOT:   defer_reductions
func.func public @total_is_read(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> (!w, !w, !w) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %b0, %c0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    %2 = stablehlo.tanh %q : tensor<4x4xf32>
    mpmd.return %1, %2 : tensor<4x4xf32>, tensor<4x4xf32>
  } : (!x, !w) -> (!w, !w)
  %b1, %c1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    %2 = stablehlo.tanh %q : tensor<4x4xf32>
    mpmd.return %1, %2 : tensor<4x4xf32>, tensor<4x4xf32>
  } : (!x, !w) -> (!w, !w)
  return %b1, %c0, %c1 : !w, !w, !w
}

// -----

// So does one that reads the new total.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @sum_is_read
// CHECK-NOT:   defer_reductions
func.func public @sum_is_read(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> (!w, !w, !w) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %b0, %c0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    %2 = stablehlo.tanh %1 : tensor<4x4xf32>
    mpmd.return %1, %2 : tensor<4x4xf32>, tensor<4x4xf32>
  } : (!x, !w) -> (!w, !w)
  %b1, %c1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    %2 = stablehlo.tanh %1 : tensor<4x4xf32>
    mpmd.return %1, %2 : tensor<4x4xf32>, tensor<4x4xf32>
  } : (!x, !w) -> (!w, !w)
  return %b1, %c0, %c1 : !w, !w, !w
}

// -----

// Or that returns it twice.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @sum_is_returned_twice
// CHECK-NOT:   defer_reductions
func.func public @sum_is_returned_twice(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> (!w, !w, !w) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %b0, %c0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1, %1 : tensor<4x4xf32>, tensor<4x4xf32>
  } : (!x, !w) -> (!w, !w)
  %b1, %c1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %b0) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %q, %0 : tensor<4x4xf32>
    mpmd.return %1, %1 : tensor<4x4xf32>, tensor<4x4xf32>
  } : (!x, !w) -> (!w, !w)
  return %b1, %c0, %c1 : !w, !w, !w
}

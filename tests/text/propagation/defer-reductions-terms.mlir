// RUN: mpmd-opt %s -mpmd-defer-reductions -split-input-file | FileCheck %s

// Two stages of a mesh share a weight: one computes its term, the other adds that to its own and to the
// total. The term is carried in partial form, too.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @term_of_another_fragment
// CHECK:         %[[G0:.*]] = mpmd.fragment<mesh="m1", origin=["g"(1)], out_shardings=[<@mesh, [{"data"}, {}, {}]>]> (%{{.*}}) {call_counter = 0
// CHECK:         %[[Z:.*]] = mpmd.fragment<mesh="m1", origin=[]{{.*}} () {mpmd.inferred_by = ["start_reductions"]}
// CHECK:         %[[F0:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]{{.*}} (%{{.*}}, %[[Z]], %[[G0]]) {call_counter = 0
// CHECK:         %[[G1:.*]] = mpmd.fragment<mesh="m1", origin=["g"(1)]{{.*}} (%{{.*}}) {call_counter = 1
// CHECK:         %[[F1:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]{{.*}} (%{{.*}}, %[[F0]], %[[G1]]) {call_counter = 1
// CHECK:         %[[S:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[F1]], %{{.*}}) {mpmd.inferred_by = ["defer_reductions"]}
// CHECK:         return %[[S]]
func.func public @term_of_another_fragment(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> !w attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %g0 = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%x0) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!x) -> !w
  %f0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start, %g0) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>, %t: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %t, %0 : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!x, !w, !w) -> !w
  %g1 = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%x1) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!x) -> !w
  %f1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %f0, %g1) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>, %t: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %t, %0 : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!x, !w, !w) -> !w
  return %f1 : !w
}

// -----

// A term that its reader computes something else of is whole, and the sum with it.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @term_is_read
// CHECK-NOT:   tensor<2x4x4xf32>
// CHECK-NOT:   defer_reductions
func.func public @term_is_read(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> (!w, !w, !w) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %g0 = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%x0) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!x) -> !w
  %f0, %h0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start, %g0) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>, %t: tensor<4x4xf32>) {
    %3 = stablehlo.tanh %t : tensor<4x4xf32>
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %t, %0 : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2, %3 : tensor<4x4xf32>, tensor<4x4xf32>
  } : (!x, !w, !w) -> (!w, !w)
  %g1 = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%x1) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!x) -> !w
  %f1, %h1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %f0, %g1) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>, %t: tensor<4x4xf32>) {
    %3 = stablehlo.tanh %t : tensor<4x4xf32>
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %t, %0 : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2, %3 : tensor<4x4xf32>, tensor<4x4xf32>
  } : (!x, !w, !w) -> (!w, !w)
  return %f1, %h0, %h1 : !w, !w, !w
}

// -----

// So is one that another fragment reads, too.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @term_is_read_twice
// CHECK-NOT:   tensor<2x4x4xf32>
// CHECK-NOT:   defer_reductions
func.func public @term_is_read_twice(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> (!w, !w, !w) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %g0 = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%x0) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!x) -> !w
  %f0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %start, %g0) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>, %t: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %t, %0 : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!x, !w, !w) -> !w
  %g1 = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%x1) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!x) -> !w
  %f1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %f0, %g1) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>, %t: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %t, %0 : tensor<4x4xf32>
    %2 = stablehlo.add %q, %1 : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!x, !w, !w) -> !w
  return %f1, %g0, %g1 : !w, !w, !w
}

// -----

// Each microbatch needs the sum of its own terms: nothing is gained by a fragment that takes it.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @sum_of_one_microbatch
// CHECK-NOT:   tensor<2x4x4xf32>
// CHECK-NOT:   defer_reductions
func.func public @sum_of_one_microbatch(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>}, %start: !w) -> (!w, !w) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %g0 = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%x0) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!x) -> !w
  %f0 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x0, %g0) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %t: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %t, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %c0 = mpmd.fragment<mesh="m1", origin=["c"(1)]> (%f0) {call_counter = 0 : ui32} (%t: tensor<4x4xf32>) {
    %0 = stablehlo.tanh %t : tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!w) -> !w
  %g1 = mpmd.fragment<mesh="m1", origin=["g"(1)]> (%x1) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!x) -> !w
  %f1 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%x1, %g1) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %t: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %p, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.add %t, %0 : tensor<4x4xf32>
    mpmd.return %1 : tensor<4x4xf32>
  } : (!x, !w) -> !w
  %c1 = mpmd.fragment<mesh="m1", origin=["c"(1)]> (%f1) {call_counter = 1 : ui32} (%t: tensor<4x4xf32>) {
    %0 = stablehlo.tanh %t : tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!w) -> !w
  return %c0, %c1 : !w, !w
}

// RUN: mpmd-opt %s -mpmd-hoist-gathers -split-input-file | FileCheck %s

// Rows lie over "data", and so does the weight: it is gathered before the first use, and stays split for who
// reads it as it lies.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @weight_of_a_product
// CHECK-SAME:    (%{{[^:]*}}: !mpmd{{[^%]*}}%[[W:[^:]*]]: !mpmd
// CHECK:         %[[G:.*]] = mpmd.fragment<mesh="m1", origin=[], out_shardings=[<@mesh, [{}, {}]>]> (%[[W]]) {mpmd.inferred_by = ["hoist_gathers"]}
// CHECK-NEXT:      mpmd.return
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"]> (%{{.*}}, %[[G]]) {call_counter = 0
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"]> (%{{.*}}, %[[G]]) {call_counter = 1
// CHECK:         mpmd.fragment<mesh="m1", origin=["update"]> (%[[W]])
func.func public @weight_of_a_product(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>},
    %w: !w {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> (!x, !x, !w) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %f0 = mpmd.fragment<mesh="m1", origin=["f"]> (%x0, %w) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !w) -> !x
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%x1, %w) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !w) -> !x
  %u = mpmd.fragment<mesh="m1", origin=["update"]> (%w) (%p: tensor<4x4xf32>) {
    %0 = stablehlo.negate %p : tensor<4x4xf32>
    mpmd.return %0 : tensor<4x4xf32>
  } : (!w) -> !w
  return %f0, %f1, %u : !x, !x, !w
}

// -----

// Rows are not split: how a weight is split decides how its products are.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @rows_are_whole
// CHECK-NOT:   hoist_gathers
func.func public @rows_are_whole(%x: !b, %w: !w {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> (!x, !x) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %f0 = mpmd.fragment<mesh="m1", origin=["f"]> (%x0, %w) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !w) -> !x
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%x1, %w) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !w) -> !x
  return %f0, %f1 : !x, !x
}

// -----

// An axis that splits weights alone is tensor parallelism: only "data" is gathered.

sdy.mesh @mesh = <["data"=2, "model"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2, "model"=2]>>>

// CHECK-LABEL: func.func public @two_axes
// CHECK:         origin=[], out_shardings=[<@mesh, [{}, {"model"}]>]>
func.func public @two_axes(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>},
    %w: !w {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"model"}]>}) -> (!x, !x) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %f0 = mpmd.fragment<mesh="m1", origin=["f"]> (%x0, %w) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !w) -> !x
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%x1, %w) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !w) -> !x
  return %f0, %f1 : !x, !x
}

// -----

// A weight with one use in the step is gathered there.  So is one that only one microbatch reads.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @one_use
// CHECK-NOT:   hoist_gathers
func.func public @one_use(%x0: !x {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}, %w: !w {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> !x attributes {topology = #topology} {
  %f0 = mpmd.fragment<mesh="m1", origin=["f"]> (%x0, %w) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !w) -> !x
  return %f0 : !x
}

// -----

// Experts lie as their tokens do, which a product matches: nothing is gathered.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<2x4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @experts
// CHECK-NOT:   hoist_gathers
func.func public @experts(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}, {}]>},
    %w: !w {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}, {}]>}) -> (!x, !x) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:2, 0:8, 0:4] : (tensor<2x2x8x4xf32>) -> tensor<1x2x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x2x8x4xf32>) -> tensor<2x8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:2, 0:8, 0:4] : (tensor<2x2x8x4xf32>) -> tensor<1x2x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x2x8x4xf32>) -> tensor<2x8x4xf32>
    mpmd.return %1, %3 : tensor<2x8x4xf32>, tensor<2x8x4xf32>
  } : (!b) -> (!x, !x)
  %f0 = mpmd.fragment<mesh="m1", origin=["f"]> (%x0, %w) {call_counter = 0 : ui32} (%p: tensor<2x8x4xf32>, %q: tensor<2x4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<2x8x4xf32>, tensor<2x4x4xf32>) -> tensor<2x8x4xf32>
    mpmd.return %0 : tensor<2x8x4xf32>
  } : (!x, !w) -> !x
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%x1, %w) {call_counter = 1 : ui32} (%p: tensor<2x8x4xf32>, %q: tensor<2x4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<2x8x4xf32>, tensor<2x4x4xf32>) -> tensor<2x8x4xf32>
    mpmd.return %0 : tensor<2x8x4xf32>
  } : (!x, !w) -> !x
  return %f0, %f1 : !x, !x
}

// -----

// A weight of another mesh crosses split, and is gathered where it is used.  Stages with one body have their
// own weights.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m2", tensor<8x4xf32>>
!b = !mpmd.mesh_tensor<"m2", tensor<2x8x4xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
!t = !mpmd.mesh_tensor<"m2", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>, <"m2" : <["data"=2]>>>

// CHECK-LABEL: func.func public @weights_of_another_mesh
// CHECK:         %[[T:.*]] = mpmd.transfer
// CHECK:         %[[U:.*]] = mpmd.transfer
// CHECK:         %[[G:.*]] = mpmd.fragment<mesh="m2", origin=[], out_shardings=[<@mesh, [{}, {}]>]> (%[[T]]) {mpmd.inferred_by = ["hoist_gathers"]}
// CHECK:         mpmd.fragment<mesh="m2", origin=["f"]> (%{{.*}}, %[[G]]) {call_counter = 0
// CHECK:         %[[H:.*]] = mpmd.fragment<mesh="m2", origin=[], out_shardings=[<@mesh, [{}, {}]>]> (%[[U]]) {mpmd.inferred_by = ["hoist_gathers"]}
// CHECK:         mpmd.fragment<mesh="m2", origin=["g"]> (%{{.*}}, %[[H]]) {call_counter = 0
// CHECK:         mpmd.fragment<mesh="m2", origin=["f"]> (%{{.*}}, %[[G]]) {call_counter = 1
// CHECK:         mpmd.fragment<mesh="m2", origin=["g"]> (%{{.*}}, %[[H]]) {call_counter = 1
func.func public @weights_of_another_mesh(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>},
    %v: !w {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %w: !w {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> (!x, !x) attributes {topology = #topology} {
  %t = mpmd.transfer %v : (!w) -> !t
  %u = mpmd.transfer %w : (!w) -> !t
  %x0, %x1 = mpmd.fragment<mesh="m2", origin=[]> (%x) (%p: tensor<2x8x4xf32>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xf32>) -> tensor<1x8x4xf32>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
    mpmd.return %1, %3 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!b) -> (!x, !x)
  %f0 = mpmd.fragment<mesh="m2", origin=["f"]> (%x0, %t) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !t) -> !x
  %g0 = mpmd.fragment<mesh="m2", origin=["g"]> (%f0, %u) {call_counter = 0 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !t) -> !x
  %f1 = mpmd.fragment<mesh="m2", origin=["f"]> (%x1, %t) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !t) -> !x
  %g1 = mpmd.fragment<mesh="m2", origin=["g"]> (%f1, %u) {call_counter = 1 : ui32} (%p: tensor<8x4xf32>, %q: tensor<4x4xf32>) {
    %0 = stablehlo.dot_general %p, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!x, !t) -> !x
  return %g0, %g1 : !x, !x
}

// -----

// What is used as bf16 alone is cast before it is gathered; not so what another fragment uses as it is.

sdy.mesh @mesh = <["data"=2]>
!x = !mpmd.mesh_tensor<"m1", tensor<8x4xbf16>>
!b = !mpmd.mesh_tensor<"m1", tensor<2x8x4xbf16>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>
#topology = #mpmd.topology<<"m1" : <["data"=2]>>>

// CHECK-LABEL: func.func public @masters
// CHECK:         %[[G:.*]] = mpmd.fragment<mesh="m1", origin=[], out_shardings=[<@mesh, [{}, {}]>]> (%{{.*}}) {mpmd.inferred_by = ["hoist_gathers"]}
// CHECK-NEXT:      %[[C:.*]] = stablehlo.convert %{{.*}} : (tensor<4x4xf32>) -> tensor<4x4xbf16>
// CHECK-NEXT:      mpmd.return %[[C]] : tensor<4x4xbf16>
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"]> (%{{.*}}, %[[G]]) {call_counter = 0 : ui32} (%[[P:.*]]: tensor<8x4xbf16>, %[[Q:.*]]: tensor<4x4xbf16>)
// CHECK-NEXT:      stablehlo.dot_general %[[P]], %[[Q]]
// CHECK:         %[[H:.*]] = mpmd.fragment<mesh="m1", origin=[], out_shardings=[<@mesh, [{}, {}]>]> (%{{.*}}) {mpmd.inferred_by = ["hoist_gathers"]}
// CHECK-NEXT:      mpmd.return %{{.*}} : tensor<4x4xf32>
// CHECK:         mpmd.fragment<mesh="m1", origin=["g"]> (%{{.*}}, %[[H]]) {call_counter = 0
// CHECK-NEXT:      stablehlo.convert
// CHECK:         mpmd.fragment<mesh="m1", origin=["h"]> (%{{.*}}, %[[H]]) {call_counter = 0
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"]> (%{{.*}}, %[[G]]) {call_counter = 1
// CHECK-NEXT:      stablehlo.dot_general
func.func public @masters(%x: !b {sdy.sharding = #sdy.sharding<@mesh, [{}, {"data"}, {}]>},
    %w1: !w {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %w2: !w {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> (!x, !x, !x, !x, !x, !x) attributes {topology = #topology} {
  %x0, %x1 = mpmd.fragment<mesh="m1", origin=[]> (%x) (%p: tensor<2x8x4xbf16>) {
    %0 = stablehlo.slice %p [0:1, 0:8, 0:4] : (tensor<2x8x4xbf16>) -> tensor<1x8x4xbf16>
    %1 = stablehlo.reshape %0 : (tensor<1x8x4xbf16>) -> tensor<8x4xbf16>
    %2 = stablehlo.slice %p [1:2, 0:8, 0:4] : (tensor<2x8x4xbf16>) -> tensor<1x8x4xbf16>
    %3 = stablehlo.reshape %2 : (tensor<1x8x4xbf16>) -> tensor<8x4xbf16>
    mpmd.return %1, %3 : tensor<8x4xbf16>, tensor<8x4xbf16>
  } : (!b) -> (!x, !x)
  %f0 = mpmd.fragment<mesh="m1", origin=["f"]> (%x0, %w1) {call_counter = 0 : ui32} (%p: tensor<8x4xbf16>, %q: tensor<4x4xf32>) {
    %1 = stablehlo.convert %q : (tensor<4x4xf32>) -> tensor<4x4xbf16>
    %2 = stablehlo.dot_general %p, %1, contracting_dims = [1] x [0] : (tensor<8x4xbf16>, tensor<4x4xbf16>) -> tensor<8x4xbf16>
    mpmd.return %2 : tensor<8x4xbf16>
  } : (!x, !w) -> !x
  %g0 = mpmd.fragment<mesh="m1", origin=["g"]> (%x0, %w2) {call_counter = 0 : ui32} (%p: tensor<8x4xbf16>, %q: tensor<4x4xf32>) {
    %1 = stablehlo.convert %q : (tensor<4x4xf32>) -> tensor<4x4xbf16>
    %2 = stablehlo.dot_general %p, %1, contracting_dims = [1] x [0] : (tensor<8x4xbf16>, tensor<4x4xbf16>) -> tensor<8x4xbf16>
    mpmd.return %2 : tensor<8x4xbf16>
  } : (!x, !w) -> !x
  %h0 = mpmd.fragment<mesh="m1", origin=["h"]> (%x0, %w2) {call_counter = 0 : ui32} (%p: tensor<8x4xbf16>, %q: tensor<4x4xf32>) {
    %1 = stablehlo.convert %p : (tensor<8x4xbf16>) -> tensor<8x4xf32>
    %2 = stablehlo.dot_general %1, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    %3 = stablehlo.convert %2 : (tensor<8x4xf32>) -> tensor<8x4xbf16>
    mpmd.return %3 : tensor<8x4xbf16>
  } : (!x, !w) -> !x
  %f1 = mpmd.fragment<mesh="m1", origin=["f"]> (%x1, %w1) {call_counter = 1 : ui32} (%p: tensor<8x4xbf16>, %q: tensor<4x4xf32>) {
    %1 = stablehlo.convert %q : (tensor<4x4xf32>) -> tensor<4x4xbf16>
    %2 = stablehlo.dot_general %p, %1, contracting_dims = [1] x [0] : (tensor<8x4xbf16>, tensor<4x4xbf16>) -> tensor<8x4xbf16>
    mpmd.return %2 : tensor<8x4xbf16>
  } : (!x, !w) -> !x
  %g1 = mpmd.fragment<mesh="m1", origin=["g"]> (%x1, %w2) {call_counter = 1 : ui32} (%p: tensor<8x4xbf16>, %q: tensor<4x4xf32>) {
    %1 = stablehlo.convert %q : (tensor<4x4xf32>) -> tensor<4x4xbf16>
    %2 = stablehlo.dot_general %p, %1, contracting_dims = [1] x [0] : (tensor<8x4xbf16>, tensor<4x4xbf16>) -> tensor<8x4xbf16>
    mpmd.return %2 : tensor<8x4xbf16>
  } : (!x, !w) -> !x
  %h1 = mpmd.fragment<mesh="m1", origin=["h"]> (%x1, %w2) {call_counter = 1 : ui32} (%p: tensor<8x4xbf16>, %q: tensor<4x4xf32>) {
    %1 = stablehlo.convert %p : (tensor<8x4xbf16>) -> tensor<8x4xf32>
    %2 = stablehlo.dot_general %1, %q, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    %3 = stablehlo.convert %2 : (tensor<8x4xf32>) -> tensor<8x4xbf16>
    mpmd.return %3 : tensor<8x4xbf16>
  } : (!x, !w) -> !x
  return %f0, %f1, %g0, %g1, %h0, %h1 : !x, !x, !x, !x, !x, !x
}

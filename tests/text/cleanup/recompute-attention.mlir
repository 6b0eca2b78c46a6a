// RUN: mpmd-opt %s -mpmd-recompute-attention -mpmd-fragment-dce -split-input-file | FileCheck %s
// RUN: mpmd-opt %s -mpmd-recompute-attention='max-ops=1' -split-input-file | FileCheck %s --check-prefix=ONE

// The backward fragment makes the exponentials and their sums from the factors of the scores, which it reads
// anyway: the forward fragment keeps neither.

!s = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!p = !mpmd.mesh_tensor<"m1", tensor<2x8x8xf32>>
!r = !mpmd.mesh_tensor<"m1", tensor<2x8xf32>>

// CHECK-LABEL: func.func public @exponentials
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK:           mpmd.return %{{[^,]*}} : tensor<2x8x4xf32>
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)]>
// CHECK:           stablehlo.dot_general
// CHECK:           stablehlo.exponential
// CHECK:           stablehlo.reduce
// CHECK:           stablehlo.dot_general
// ONE-LABEL: func.func public @exponentials
// ONE: mpmd.fragment<mesh="m1", origin=["f"(1)]>
// ONE-NOT: stablehlo.exponential
func.func public @exponentials(%q: !s, %k: !s, %v: !s) -> (!s, !s)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %o, %e, %t = mpmd.fragment<mesh="m1", origin=["f"]> (%q, %k, %v)
      (%a: tensor<2x8x4xf32>, %b: tensor<2x8x4xf32>, %c: tensor<2x8x4xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.dot_general %a, %b, batching_dims = [0] x [0], contracting_dims = [2] x [2]
        : (tensor<2x8x4xf32>, tensor<2x8x4xf32>) -> tensor<2x8x8xf32>
    %1 = stablehlo.exponential %0 : tensor<2x8x8xf32>
    %2 = stablehlo.reduce(%1 init: %zero) applies stablehlo.add across dimensions = [2]
        : (tensor<2x8x8xf32>, tensor<f32>) -> tensor<2x8xf32>
    %3 = stablehlo.dot_general %1, %c, batching_dims = [0] x [0], contracting_dims = [2] x [1]
        : (tensor<2x8x8xf32>, tensor<2x8x4xf32>) -> tensor<2x8x4xf32>
    mpmd.return %3, %1, %2 : tensor<2x8x4xf32>, tensor<2x8x8xf32>, tensor<2x8xf32>
  } : (!s, !s, !s) -> (!s, !p, !r)
  %g = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%e, %t, %k)
      (%a: tensor<2x8x8xf32>, %b: tensor<2x8xf32>, %c: tensor<2x8x4xf32>) {
    %0 = stablehlo.broadcast_in_dim %b, dims = [0, 1] : (tensor<2x8xf32>) -> tensor<2x8x8xf32>
    %1 = stablehlo.divide %a, %0 : tensor<2x8x8xf32>
    %2 = stablehlo.dot_general %1, %c, batching_dims = [0] x [0], contracting_dims = [2] x [1]
        : (tensor<2x8x8xf32>, tensor<2x8x4xf32>) -> tensor<2x8x4xf32>
    mpmd.return %2 : tensor<2x8x4xf32>
  } : (!p, !r, !s) -> !s
  return %o, %g : !s, !s
}

// -----

// Products of weights, which have no batch, are not computed again; nor are rows alone worth a product.

!s = !mpmd.mesh_tensor<"m1", tensor<2x8x4xf32>>
!r = !mpmd.mesh_tensor<"m1", tensor<2x8xf32>>
!w = !mpmd.mesh_tensor<"m1", tensor<4x4xf32>>

// ONE-LABEL: func.func public @kept
// CHECK-LABEL: func.func public @kept
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)]> (%{{[^,]*}}, %{{[^,]*}})
// CHECK-NOT:       stablehlo.dot_general
func.func public @kept(%q: !s, %w: !w) -> (!s, !s)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %o, %t = mpmd.fragment<mesh="m1", origin=["f"]> (%q, %w) (%a: tensor<2x8x4xf32>, %b: tensor<4x4xf32>) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.dot_general %a, %b, contracting_dims = [2] x [0]
        : (tensor<2x8x4xf32>, tensor<4x4xf32>) -> tensor<2x8x4xf32>
    %1 = stablehlo.dot_general %a, %a, batching_dims = [0] x [0], contracting_dims = [2] x [2]
        : (tensor<2x8x4xf32>, tensor<2x8x4xf32>) -> tensor<2x8x8xf32>
    %2 = stablehlo.reduce(%1 init: %zero) applies stablehlo.add across dimensions = [2]
        : (tensor<2x8x8xf32>, tensor<f32>) -> tensor<2x8xf32>
    mpmd.return %0, %2 : tensor<2x8x4xf32>, tensor<2x8xf32>
  } : (!s, !w) -> (!s, !r)
  %g = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%o, %t) (%a: tensor<2x8x4xf32>, %b: tensor<2x8xf32>) {
    %0 = stablehlo.broadcast_in_dim %b, dims = [0, 1] : (tensor<2x8xf32>) -> tensor<2x8x4xf32>
    %1 = stablehlo.multiply %a, %0 : tensor<2x8x4xf32>
    mpmd.return %1 : tensor<2x8x4xf32>
  } : (!s, !r) -> !s
  return %o, %g : !s, !s
}

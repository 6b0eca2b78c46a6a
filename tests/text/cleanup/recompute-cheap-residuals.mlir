// RUN: mpmd-opt %s -mpmd-recompute-cheap-residuals -mpmd-fragment-dce -split-input-file | FileCheck %s
// RUN: mpmd-opt %s -mpmd-recompute-cheap-residuals='max-ops=0' -split-input-file | FileCheck %s --check-prefix=NONE

// A transposed argument is transposed again in the backward fragment instead of being kept for it.

!w = !mpmd.mesh_tensor<"m1", tensor<4x8xf32>>
!t = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>

// CHECK-LABEL: func.func public @transposed_weight
// CHECK-SAME:    (%[[W:[^:]*]]: !mpmd{{[^%]*}}%[[X:[^:]*]]:
// CHECK-NEXT:    %[[Y:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[X]])
// CHECK:           mpmd.return %{{[^,]*}} : tensor<8x4xf32>
// CHECK:         %[[G:.*]] = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[Y]], %[[W]])
// CHECK-SAME:      (%[[A:.*]]: tensor<8x4xf32>, %[[B:.*]]: tensor<4x8xf32>)
// CHECK-NEXT:      %[[T:.*]] = stablehlo.transpose %[[B]]
// CHECK-NEXT:      stablehlo.multiply %[[T]], %[[A]]
// NONE-LABEL: func.func public @transposed_weight
// NONE: mpmd.fragment<mesh="m1", origin=["f"(1)]>
// NONE-NOT: stablehlo.transpose
func.func public @transposed_weight(%w: !w, %x: !t) -> (!t, !t)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %y, %t = mpmd.fragment<mesh="m1", origin=["f"]> (%w, %x) (%a: tensor<4x8xf32>, %b: tensor<8x4xf32>) {
    %0 = stablehlo.transpose %a, dims = [1, 0] : (tensor<4x8xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.tanh %b : tensor<8x4xf32>
    mpmd.return %1, %0 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!w, !t) -> (!t, !t)
  %g = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%t, %y) (%a: tensor<8x4xf32>, %b: tensor<8x4xf32>) {
    %0 = stablehlo.multiply %a, %b : tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!t, !t) -> !t
  return %y, %g : !t, !t
}

// -----

// What costs more than data movement and arithmetic is kept.

!t = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>

// NONE-LABEL: func.func public @tanh_is_kept
// CHECK-LABEL: func.func public @tanh_is_kept
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)]> (%{{[^,]*}})
// CHECK-NEXT:      stablehlo.negate
func.func public @tanh_is_kept(%x: !t) -> !t
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %y = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%b: tensor<8x4xf32>) {
    %1 = stablehlo.tanh %b : tensor<8x4xf32>
    mpmd.return %1 : tensor<8x4xf32>
  } : (!t) -> !t
  %g = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%y) (%a: tensor<8x4xf32>) {
    %0 = stablehlo.negate %a : tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!t) -> !t
  return %g : !t
}

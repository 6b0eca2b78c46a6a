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

// -----

// Two residuals follow from a tanh that is none: it is kept in the place of one of them.

!t = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>

// CHECK-LABEL: func.func public @both_from_a_function
// CHECK:         %[[K:.*]] = mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK:           %[[T:.*]] = stablehlo.tanh
// CHECK-NEXT:      mpmd.return %[[T]] : tensor<8x4xf32>
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[K]]) (%[[A:.*]]: tensor<8x4xf32>)
// CHECK-DAG:       stablehlo.negate %[[A]]
// CHECK-DAG:       stablehlo.multiply %[[A]], %[[A]]
// CHECK:           stablehlo.add
// NONE-LABEL: func.func public @both_from_a_function
// NONE:           mpmd.return %{{.*}}, %{{.*}} : tensor<8x4xf32>, tensor<8x4xf32>
func.func public @both_from_a_function(%x: !t) -> !t
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %n, %q = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%a: tensor<8x4xf32>) {
    %0 = stablehlo.tanh %a : tensor<8x4xf32>
    %1 = stablehlo.negate %0 : tensor<8x4xf32>
    %2 = stablehlo.multiply %0, %0 : tensor<8x4xf32>
    mpmd.return %1, %2 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!t) -> (!t, !t)
  %g = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%n, %q) (%a: tensor<8x4xf32>, %b: tensor<8x4xf32>) {
    %0 = stablehlo.add %a, %b : tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!t, !t) -> !t
  return %g : !t
}

// -----

// Both are read elsewhere, too: as what they are.

!t = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>

// NONE-LABEL: func.func public @both_are_results
// CHECK-LABEL: func.func public @both_are_results
// CHECK:         %[[N:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]>
// CHECK:           mpmd.return %{{.*}}, %{{.*}} : tensor<8x4xf32>, tensor<8x4xf32>
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"(1)]> (%[[N]]#0, %[[N]]#1)
// CHECK-NEXT:      stablehlo.add
func.func public @both_are_results(%x: !t) -> (!t, !t, !t)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %n, %q = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%a: tensor<8x4xf32>) {
    %0 = stablehlo.tanh %a : tensor<8x4xf32>
    %1 = stablehlo.negate %0 : tensor<8x4xf32>
    %2 = stablehlo.multiply %0, %0 : tensor<8x4xf32>
    mpmd.return %1, %2 : tensor<8x4xf32>, tensor<8x4xf32>
  } : (!t) -> (!t, !t)
  %g = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%n, %q) (%a: tensor<8x4xf32>, %b: tensor<8x4xf32>) {
    %0 = stablehlo.add %a, %b : tensor<8x4xf32>
    mpmd.return %0 : tensor<8x4xf32>
  } : (!t, !t) -> !t
  return %g, %n, %q : !t, !t, !t
}

// -----

// What both follow from is of another type: it would take more memory than they do.

!x = !mpmd.mesh_tensor<"m1", tensor<8x4xf32>>
!t = !mpmd.mesh_tensor<"m1", tensor<8x4xbf16>>

// NONE-LABEL: func.func public @narrower
// CHECK-LABEL: func.func public @narrower
// CHECK:           mpmd.return %{{.*}}, %{{.*}} : tensor<8x4xbf16>, tensor<8x4xbf16>
func.func public @narrower(%x: !x) -> !t
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %n, %q = mpmd.fragment<mesh="m1", origin=["f"]> (%x) (%a: tensor<8x4xf32>) {
    %0 = stablehlo.tanh %a : tensor<8x4xf32>
    %1 = stablehlo.convert %0 : (tensor<8x4xf32>) -> tensor<8x4xbf16>
    %2 = stablehlo.multiply %0, %0 : tensor<8x4xf32>
    %3 = stablehlo.convert %2 : (tensor<8x4xf32>) -> tensor<8x4xbf16>
    mpmd.return %1, %3 : tensor<8x4xbf16>, tensor<8x4xbf16>
  } : (!x) -> (!t, !t)
  %g = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%n, %q) (%a: tensor<8x4xbf16>, %b: tensor<8x4xbf16>) {
    %0 = stablehlo.add %a, %b : tensor<8x4xbf16>
    mpmd.return %0 : tensor<8x4xbf16>
  } : (!t, !t) -> !t
  return %g : !t
}

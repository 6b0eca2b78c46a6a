// RUN: mpmd-opt %s -mpmd-simplify-stablehlo | FileCheck %s

// Indices of an unrolled loop are known.
// CHECK-LABEL: func @indices
func.func @indices(%a: tensor<8x4xf32>) -> tensor<2x4xf32> {
  // CHECK-NEXT: %[[S:.*]] = stablehlo.slice %arg0 [4:6, 0:4]
  // CHECK-NEXT: return %[[S]]
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c2 = stablehlo.constant dense<2> : tensor<i32>
  %c8 = stablehlo.constant dense<8> : tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %i = stablehlo.add %c1, %c1 : tensor<i32>
  %j = stablehlo.multiply %i, %c2 : tensor<i32>
  %neg = stablehlo.compare LT, %j, %zero, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %plus = stablehlo.add %j, %c8 : tensor<i32>
  %k = stablehlo.select %neg, %plus, %j : tensor<i1>, tensor<i32>
  %s = stablehlo.dynamic_slice %a, %k, %zero, sizes = [2, 4] : (tensor<8x4xf32>, tensor<i32>, tensor<i32>) -> tensor<2x4xf32>
  return %s : tensor<2x4xf32>
}

// Indices out of range are clamped, as dynamic_slice means it; arithmetic wraps around.
// CHECK-LABEL: func @clamped_and_wrapped
func.func @clamped_and_wrapped(%a: tensor<8xf32>) -> (tensor<2xf32>, tensor<i8>, tensor<ui8>, tensor<i1>) {
  // CHECK-DAG: stablehlo.slice %arg0 [6:8]
  // CHECK-DAG: stablehlo.constant dense<-128> : tensor<i8>
  // CHECK-DAG: stablehlo.constant dense<255> : tensor<ui8>
  // CHECK-DAG: stablehlo.constant dense<false> : tensor<i1>
  %big = stablehlo.constant dense<100> : tensor<i32>
  %s = stablehlo.dynamic_slice %a, %big, sizes = [2] : (tensor<8xf32>, tensor<i32>) -> tensor<2xf32>
  %m = stablehlo.constant dense<127> : tensor<i8>
  %one = stablehlo.constant dense<1> : tensor<i8>
  %w = stablehlo.add %m, %one : tensor<i8>
  %u = stablehlo.constant dense<1> : tensor<ui8>
  %v = stablehlo.negate %u : tensor<ui8>
  %t = stablehlo.constant dense<true> : tensor<i1>
  %n = stablehlo.not %t : tensor<i1>
  return %s, %w, %v, %n : tensor<2xf32>, tensor<i8>, tensor<ui8>, tensor<i1>
}

// What a loop writes piece by piece and reads piece by piece needs no buffer.
// CHECK-LABEL: func @pieces_of_a_buffer
func.func @pieces_of_a_buffer(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<2x4xf32>) {
  // CHECK-DAG: %[[X:.*]] = stablehlo.reshape %arg0
  // CHECK-DAG: %[[Y:.*]] = stablehlo.reshape %arg1
  // CHECK-DAG: %[[ALL:.*]] = stablehlo.concatenate %[[X]], %[[Y]], dim = 0
  // CHECK-NOT: dynamic
  // CHECK: return %arg0, %[[ALL]]
  %f0 = stablehlo.constant dense<0.0> : tensor<2x4xf32>
  %i0 = stablehlo.constant dense<0> : tensor<i32>
  %i1 = stablehlo.constant dense<1> : tensor<i32>
  %x1 = stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<4xf32>) -> tensor<1x4xf32>
  %b0 = stablehlo.dynamic_update_slice %f0, %x1, %i0, %i0 : (tensor<2x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<2x4xf32>
  %y1 = stablehlo.reshape %y : (tensor<4xf32>) -> tensor<1x4xf32>
  %b1 = stablehlo.dynamic_update_slice %b0, %y1, %i1, %i0 : (tensor<2x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<2x4xf32>
  %s = stablehlo.dynamic_slice %b1, %i0, %i0, sizes = [1, 4] : (tensor<2x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>
  %r = stablehlo.reshape %s : (tensor<1x4xf32>) -> tensor<4xf32>
  return %r, %b1 : tensor<4xf32>, tensor<2x4xf32>
}

// A piece that was never written is a piece of the first buffer; an update in part of a slice stays.
// CHECK-LABEL: func @unwritten_and_partly_written
func.func @unwritten_and_partly_written(%b: tensor<4xf32>, %x: tensor<1xf32>) -> (tensor<1xf32>, tensor<2xf32>) {
  // CHECK: %[[B:.*]] = stablehlo.dynamic_update_slice
  // CHECK-DAG: %[[FIRST:.*]] = stablehlo.slice %arg0 [0:1]
  // CHECK-DAG: %[[PART:.*]] = stablehlo.slice %[[B]] [1:3]
  // CHECK: return %[[FIRST]], %[[PART]]
  %i = stablehlo.constant dense<2> : tensor<i32>
  %u = stablehlo.dynamic_update_slice %b, %x, %i : (tensor<4xf32>, tensor<1xf32>, tensor<i32>) -> tensor<4xf32>
  %s = stablehlo.slice %u [0:1] : (tensor<4xf32>) -> tensor<1xf32>
  %t = stablehlo.slice %u [1:3] : (tensor<4xf32>) -> tensor<2xf32>
  return %s, %t : tensor<1xf32>, tensor<2xf32>
}

// CHECK-LABEL: func @slices
func.func @slices(%a: tensor<4xf32>, %b: tensor<6xf32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<4xf32>) {
  // CHECK-DAG: %[[P:.*]] = stablehlo.slice %arg1 [1:4:2]
  // CHECK-DAG: %[[Q:.*]] = stablehlo.slice %arg1 [1:6:4]
  // CHECK: return %[[P]], %[[Q]], %arg0
  %c = stablehlo.concatenate %a, %b, dim = 0 : (tensor<4xf32>, tensor<6xf32>) -> tensor<10xf32>
  %p = stablehlo.slice %c [5:9:2] : (tensor<10xf32>) -> tensor<2xf32>
  %q = stablehlo.slice %b [1:6:2] : (tensor<6xf32>) -> tensor<3xf32>
  %r = stablehlo.slice %q [0:3:2] : (tensor<3xf32>) -> tensor<2xf32>
  %w = stablehlo.slice %c [0:4] : (tensor<10xf32>) -> tensor<4xf32>
  return %p, %r, %w : tensor<2xf32>, tensor<2xf32>, tensor<4xf32>
}

// CHECK-LABEL: func @identities
func.func @identities(%a: tensor<2x3xf32>, %i: tensor<2x3xi32>) -> (tensor<2x3xf32>, tensor<2x3xi32>) {
  // CHECK-NEXT: return %arg0, %arg1
  %t = stablehlo.transpose %a, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
  %u = stablehlo.transpose %t, dims = [1, 0] : (tensor<3x2xf32>) -> tensor<2x3xf32>
  %r = stablehlo.reshape %u : (tensor<2x3xf32>) -> tensor<6xf32>
  %s = stablehlo.reshape %r : (tensor<6xf32>) -> tensor<2x3xf32>
  %d = stablehlo.broadcast_in_dim %s, dims = [0, 1] : (tensor<2x3xf32>) -> tensor<2x3xf32>
  %v = stablehlo.convert %d : tensor<2x3xf32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %ones = stablehlo.broadcast_in_dim %one, dims = [] : (tensor<f32>) -> tensor<2x3xf32>
  %w = stablehlo.multiply %ones, %v : tensor<2x3xf32>
  %z = stablehlo.constant dense<0> : tensor<2x3xi32>
  %j = stablehlo.add %i, %z : tensor<2x3xi32>
  return %w, %j : tensor<2x3xf32>, tensor<2x3xi32>
}

// A sum with a zero of any sign is the other term, as XLA has it; subtracting -0 stays, as XLA has that too.
// CHECK-LABEL: func @zeros
func.func @zeros(%a: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) {
  // CHECK: %[[REST:.*]] = stablehlo.subtract %arg0
  // CHECK: return %arg0, %arg0, %arg0, %[[REST]]
  %p = stablehlo.constant dense<0.0> : tensor<4xf32>
  %n = stablehlo.constant dense<-0.0> : tensor<4xf32>
  %s = stablehlo.add %a, %p : tensor<4xf32>
  %t = stablehlo.add %n, %a : tensor<4xf32>
  %u = stablehlo.subtract %a, %p : tensor<4xf32>
  %v = stablehlo.subtract %a, %n : tensor<4xf32>
  return %s, %t, %u, %v : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
}

// Bodies of computations and loops are simplified too; what a loop carries is not known.
// CHECK-LABEL: func @bodies
func.func @bodies(%a: tensor<4xf32>, %n: tensor<i32>) -> (tensor<4xf32>, tensor<i32>) {
  // CHECK: named_computation<"f">
  // CHECK-NEXT: stablehlo.negate %arg2
  // CHECK-NEXT: mpmd.return
  %0 = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
    %1 = stablehlo.reshape %p : (tensor<4xf32>) -> tensor<4xf32>
    %2 = stablehlo.negate %1 : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  // CHECK: stablehlo.while
  // CHECK: stablehlo.add %iterArg
  %i = stablehlo.constant dense<0> : tensor<i32>
  %w = stablehlo.while(%iterArg = %i) : tensor<i32>
   cond {
    %c = stablehlo.compare LT, %iterArg, %n, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %s = stablehlo.add %iterArg, %one : tensor<i32>
    stablehlo.return %s : tensor<i32>
  }
  return %0, %w : tensor<4xf32>, tensor<i32>
}

// Nothing to fold: an iota stays, elementwise arithmetic on tensors stays, effects stay.
// CHECK-LABEL: func @unchanged
func.func @unchanged(%a: tensor<4xi32>, %i: tensor<i32>) -> (tensor<4xi32>, tensor<2xi32>) {
  // CHECK-NEXT: %[[IOTA:.*]] = stablehlo.iota
  // CHECK-NEXT: %[[TWOS:.*]] = stablehlo.constant dense<2>
  // CHECK-NEXT: %[[SUM:.*]] = stablehlo.add %[[IOTA]], %[[TWOS]]
  // CHECK-NEXT: %[[PART:.*]] = stablehlo.dynamic_slice %arg0, %arg1
  // CHECK-NEXT: stablehlo.custom_call @print
  // CHECK-NEXT: return %[[SUM]], %[[PART]]
  %iota = stablehlo.iota dim = 0 : tensor<4xi32>
  %two = stablehlo.constant dense<2> : tensor<4xi32>
  %s = stablehlo.add %iota, %two : tensor<4xi32>
  %d = stablehlo.dynamic_slice %a, %i, sizes = [2] : (tensor<4xi32>, tensor<i32>) -> tensor<2xi32>
  %c = stablehlo.custom_call @print(%d) {has_side_effect = true} : (tensor<2xi32>) -> tensor<2xi32>
  return %s, %d : tensor<4xi32>, tensor<2xi32>
}

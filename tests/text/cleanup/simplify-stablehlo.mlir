// RUN: mpmd-opt %s -mpmd-simplify-stablehlo | FileCheck %s
// RUN: mpmd-opt %s -mpmd-simplify-stablehlo='fold-constants=true' | FileCheck %s --check-prefix=FOLDED

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

// Adding a zero of either sign: as in XLA, a zero keeps its sign.
// CHECK-LABEL: func @add_zero
func.func @add_zero(%a: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  // CHECK-NEXT: return %arg0, %arg0
  %p = stablehlo.constant dense<0.0> : tensor<4xf32>
  %n = stablehlo.constant dense<-0.0> : tensor<4xf32>
  %s = stablehlo.add %a, %p : tensor<4xf32>
  %t = stablehlo.add %n, %a : tensor<4xf32>
  return %s, %t : tensor<4xf32>, tensor<4xf32>
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

// The gradient of a concatenate: each slice of the sum of pads is what one of them is of.
// CHECK-LABEL: func @padded
func.func @padded(%a: tensor<2x4xf32>, %b: tensor<2x4xf32>, %c: tensor<2x4xf32>)
    -> (tensor<2x4xf32>, tensor<1x4xf32>, tensor<2x2xf32>, tensor<2x4xf32>) {
  // CHECK-NEXT: %[[CONST:.*]] = stablehlo.constant dense<0.000000e+00>
  // CHECK-NEXT: %[[A:.*]] = stablehlo.pad %arg0
  // CHECK-NEXT: %[[B:.*]] = stablehlo.pad %arg1
  // CHECK-NEXT: %[[AB:.*]] = stablehlo.add %[[A]], %[[B]]
  // CHECK-NEXT: %[[ROW:.*]] = stablehlo.slice %arg1 [1:2, 0:4]
  // CHECK-NEXT: %[[COLUMNS:.*]] = stablehlo.slice %arg2 [0:2, 1:4:2]
  // CHECK-NEXT: %[[BOTH:.*]] = stablehlo.slice %[[AB]] [1:3, 0:4]
  // CHECK-NEXT: return %arg0, %[[ROW]], %[[COLUMNS]], %[[BOTH]]
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.pad %a, %zero, low = [0, 0], high = [4, 0], interior = [0, 0] : (tensor<2x4xf32>, tensor<f32>) -> tensor<6x4xf32>
  %1 = stablehlo.pad %b, %zero, low = [2, 0], high = [2, 0], interior = [0, 0] : (tensor<2x4xf32>, tensor<f32>) -> tensor<6x4xf32>
  %2 = stablehlo.pad %c, %zero, low = [4, 0], high = [0, 0], interior = [0, 0] : (tensor<2x4xf32>, tensor<f32>) -> tensor<6x4xf32>
  %3 = stablehlo.add %0, %1 : tensor<6x4xf32>
  %4 = stablehlo.add %3, %2 : tensor<6x4xf32>
  %5 = stablehlo.slice %4 [0:2, 0:4] : (tensor<6x4xf32>) -> tensor<2x4xf32>
  %6 = stablehlo.slice %4 [3:4, 0:4] : (tensor<6x4xf32>) -> tensor<1x4xf32>
  %7 = stablehlo.slice %4 [4:6, 1:4:2] : (tensor<6x4xf32>) -> tensor<2x2xf32>
  %8 = stablehlo.slice %4 [1:3, 0:4] : (tensor<6x4xf32>) -> tensor<2x4xf32>
  return %5, %6, %7, %8 : tensor<2x4xf32>, tensor<1x4xf32>, tensor<2x2xf32>, tensor<2x4xf32>
}

// Padding that is no zero, and elements with padding between them, stay.
// CHECK-LABEL: func @padded_otherwise
func.func @padded_otherwise(%a: tensor<2xf32>, %b: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  // CHECK: %[[SUM:.*]] = stablehlo.add
  // CHECK: %[[FIRST:.*]] = stablehlo.slice %[[SUM]] [0:2]
  // CHECK: %[[SPREAD:.*]] = stablehlo.pad %arg0
  // CHECK: %[[SECOND:.*]] = stablehlo.slice %[[SPREAD]] [0:2]
  // CHECK: return %[[FIRST]], %[[SECOND]]
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %0 = stablehlo.pad %a, %zero, low = [0], high = [2], interior = [0] : (tensor<2xf32>, tensor<f32>) -> tensor<4xf32>
  %1 = stablehlo.pad %b, %one, low = [2], high = [0], interior = [0] : (tensor<2xf32>, tensor<f32>) -> tensor<4xf32>
  %2 = stablehlo.add %0, %1 : tensor<4xf32>
  %3 = stablehlo.slice %2 [0:2] : (tensor<4xf32>) -> tensor<2xf32>
  %4 = stablehlo.pad %a, %zero, low = [0], high = [0], interior = [1] : (tensor<2xf32>, tensor<f32>) -> tensor<3xf32>
  %5 = stablehlo.slice %4 [0:2] : (tensor<3xf32>) -> tensor<2xf32>
  return %3, %5 : tensor<2xf32>, tensor<2xf32>
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

// What may be exchanged has constants last; integers times zero are zero, floating point is not.
// CHECK-LABEL: func @order
func.func @order(%a: tensor<4xf32>, %i: tensor<4xi32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xi32>, tensor<4xi32>) {
  // CHECK-DAG: %[[F0:.*]] = stablehlo.constant dense<0.0
  // CHECK-DAG: %[[F2:.*]] = stablehlo.constant dense<2.0
  // CHECK-DAG: %[[I0:.*]] = stablehlo.constant dense<0> : tensor<4xi32>
  // CHECK-DAG: %[[M:.*]] = stablehlo.maximum %arg0, %[[F2]]
  // CHECK-DAG: %[[P:.*]] = stablehlo.multiply %arg0, %[[F0]]
  // CHECK: return %[[M]], %[[P]], %[[I0]], %{{.*}}
  %f0 = stablehlo.constant dense<0.0> : tensor<4xf32>
  %f2 = stablehlo.constant dense<2.0> : tensor<4xf32>
  %i0 = stablehlo.constant dense<0> : tensor<4xi32>
  %m = stablehlo.maximum %f2, %a : tensor<4xf32>
  %p = stablehlo.multiply %f0, %a : tensor<4xf32>
  %q = stablehlo.multiply %i0, %i : tensor<4xi32>
  %r = stablehlo.subtract %i, %i : tensor<4xi32>
  return %m, %p, %q, %r : tensor<4xf32>, tensor<4xf32>, tensor<4xi32>, tensor<4xi32>
}

// A narrow integer of a wider constant stays: it is as wide as the program says.
// CHECK-LABEL: func @narrow
func.func @narrow(%x: tensor<2xi4>) -> (tensor<i4>, tensor<ui2>, tensor<i32>) {
  // CHECK-DAG: %[[A:.*]] = stablehlo.convert {{.*}} -> tensor<i4>
  // CHECK-DAG: %[[B:.*]] = stablehlo.convert {{.*}} -> tensor<ui2>
  // CHECK-DAG: %[[C:.*]] = stablehlo.constant dense<3> : tensor<i32>
  // CHECK: return %[[A]], %[[B]], %[[C]]
  %c = stablehlo.constant dense<3> : tensor<i32>
  %a = stablehlo.convert %c : (tensor<i32>) -> tensor<i4>
  %b = stablehlo.convert %c : (tensor<i32>) -> tensor<ui2>
  %w = stablehlo.constant dense<3> : tensor<i64>
  %d = stablehlo.convert %w : (tensor<i64>) -> tensor<i32>
  return %a, %b, %d : tensor<i4>, tensor<ui2>, tensor<i32>
}

// Ops of constants are computed where that is asked for; nothing is divided by zero.
// FOLDED-LABEL: func @constants
func.func @constants() -> (tensor<1024x1024xf32>, tensor<3xf32>, tensor<2x3xf32>, tensor<4xi1>, tensor<4xi32>, tensor<4xi32>) {
  // FOLDED-DAG: %[[BIG:.*]] = stablehlo.constant dense<-7.3890562> : tensor<1024x1024xf32>
  // FOLDED-DAG: %[[V:.*]] = stablehlo.constant dense<[9.0{{0*}}e+00, 4.0{{0*}}e+00, 1.0{{0*}}e+00]> : tensor<3xf32>
  // FOLDED-DAG: %[[W:.*]] = stablehlo.constant dense<{{\[\[}}1.0{{0*}}e+00, 2.0{{0*}}e+00, 3.0{{0*}}e+00], {{.*}}> : tensor<2x3xf32>
  // FOLDED-DAG: %[[LESS:.*]] = stablehlo.constant dense<false> : tensor<4xi1>
  // FOLDED-DAG: %[[TWO:.*]] = stablehlo.constant dense<2> : tensor<4xi32>
  // FOLDED-DAG: %[[BAD:.*]] = stablehlo.divide
  // FOLDED: return %[[BIG]], %[[V]], %[[W]], %[[LESS]], %[[TWO]], %[[BAD]]
  %b = stablehlo.constant dense<2.0> : tensor<1024x1024xf32>
  %e = stablehlo.exponential %b : tensor<1024x1024xf32>
  %n = stablehlo.negate %e : tensor<1024x1024xf32>
  %v = stablehlo.constant dense<[1.0, 2.0, 3.0]> : tensor<3xf32>
  %r = stablehlo.reverse %v, dims = [0] : tensor<3xf32>
  %s = stablehlo.multiply %r, %r : tensor<3xf32>
  %w = stablehlo.broadcast_in_dim %v, dims = [1] : (tensor<3xf32>) -> tensor<2x3xf32>
  %i2 = stablehlo.constant dense<3> : tensor<4xi32>
  %i0 = stablehlo.constant dense<0> : tensor<4xi32>
  %c = stablehlo.compare LT, %i2, %i0, SIGNED : (tensor<4xi32>, tensor<4xi32>) -> tensor<4xi1>
  %f = stablehlo.constant dense<2.5> : tensor<4xf32>
  %g = stablehlo.convert %f : (tensor<4xf32>) -> tensor<4xi32>
  %z = stablehlo.divide %i2, %i0 : tensor<4xi32>
  return %n, %s, %w, %c, %g, %z : tensor<1024x1024xf32>, tensor<3xf32>, tensor<2x3xf32>, tensor<4xi1>, tensor<4xi32>, tensor<4xi32>
}

// Out of the range of the target a conversion saturates, as in XLA, and a truth is what is not 0.
// FOLDED-LABEL: func @conversions
// CHECK-LABEL: func @conversions
func.func @conversions() -> (tensor<4xui8>, tensor<4xi4>, tensor<4xi1>, tensor<4xui8>, tensor<4xi1>) {
  // FOLDED-DAG: stablehlo.constant dense<0> : tensor<4xui8>
  // FOLDED-DAG: stablehlo.constant dense<7> : tensor<4xi4>
  // FOLDED-DAG: stablehlo.constant dense<true> : tensor<4xi1>
  // FOLDED-DAG: stablehlo.constant dense<100> : tensor<4xui8>
  // FOLDED: return
  %a = stablehlo.constant dense<-3.0> : tensor<4xf32>
  %b = stablehlo.constant dense<100.0> : tensor<4xf32>
  %c = stablehlo.constant dense<5.000000e-01> : tensor<4xf32>
  %d = stablehlo.constant dense<1.0> : tensor<4xf32>
  %0 = stablehlo.convert %a : (tensor<4xf32>) -> tensor<4xui8>
  %1 = stablehlo.convert %b : (tensor<4xf32>) -> tensor<4xi4>
  %2 = stablehlo.convert %c : (tensor<4xf32>) -> tensor<4xi1>
  %3 = stablehlo.convert %b : (tensor<4xf32>) -> tensor<4xui8>
  %4 = stablehlo.convert %d : (tensor<4xf32>) -> tensor<4xi1>
  return %0, %1, %2, %3, %4 : tensor<4xui8>, tensor<4xi4>, tensor<4xi1>, tensor<4xui8>, tensor<4xi1>
}

// An op with a sharding of its own keeps it; of floating point only +0 is nothing, as -0 - -0 is 0, and x - x may be
// NaN; a broadcast that exchanges dims is not a reshape.
// FOLDED-LABEL: func @kept
// CHECK-LABEL: func @kept
func.func @kept(%a: tensor<4xf32>, %b: tensor<2x3xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<3x2xf32>) {
  // CHECK-DAG: stablehlo.subtract %arg0, %arg0 : tensor<4xf32>
  // CHECK-DAG: stablehlo.broadcast_in_dim %arg1, dims = [1, 0]
  // CHECK-DAG: stablehlo.subtract %arg0, %{{.*cst.*}} : tensor<4xf32>
  // CHECK-DAG: stablehlo.multiply %arg0, {{.*}} {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>}
  %one = stablehlo.constant dense<1.0> : tensor<4xf32>
  %zero = stablehlo.constant dense<-0.0> : tensor<4xf32>
  %0 = stablehlo.multiply %a, %one {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} : tensor<4xf32>
  %1 = stablehlo.subtract %a, %zero : tensor<4xf32>
  %2 = stablehlo.subtract %a, %a : tensor<4xf32>
  %3 = stablehlo.broadcast_in_dim %b, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
  return %0, %1, %2, %3 : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<3x2xf32>
}

sdy.mesh @mesh = <["x"=2]>

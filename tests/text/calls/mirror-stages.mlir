// RUN: mpmd-opt %s -mpmd-mirror-stages='names=f,t' -split-input-file | FileCheck %s

// The second half of the microbatches calls a copy whose names have a suffix; the sum begins anew and both halves are
// added up where the whole is used.  What is not a sum goes on from call to call.

// CHECK-LABEL: func.func public @main
// CHECK-SAME:    (%[[ACC:[^:]*]]: tensor<4xf32>, %[[X:[^:]*]]: tensor<4xf32>)
// CHECK-NEXT:    %[[A:.*]]:2 = mpmd.call @body(%[[ACC]], %[[X]]) {call_counter = 0 : ui32}
// CHECK-NEXT:    %[[B:.*]]:2 = mpmd.call @body(%[[A]]#0, %[[A]]#1) {call_counter = 1 : ui32}
// CHECK-NEXT:    %[[ZERO:.*]] = stablehlo.constant dense<0.000000e+00> : tensor<4xf32>
// CHECK-NEXT:    %[[C:.*]]:2 = mpmd.call @body_mirror(%[[ZERO]], %[[B]]#1) {call_counter = 2 : ui32}
// CHECK-NEXT:    %[[SUM:.*]] = stablehlo.add %[[B]]#0, %[[C]]#0
// CHECK-NEXT:    return %[[SUM]], %[[C]]#1
func.func public @main(%acc: tensor<4xf32>, %x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %0:2 = mpmd.call @body(%acc, %x) {call_counter = 0 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %1:2 = mpmd.call @body(%0#0, %0#1) {call_counter = 1 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %2:2 = mpmd.call @body(%1#0, %1#1) {call_counter = 2 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %2#0, %2#1 : tensor<4xf32>, tensor<4xf32>
}

// CHECK-LABEL: func.func private @body_mirror
// CHECK:         mpmd.named_computation<"f_mirror"(1)>
// CHECK:         mpmd.named_tensor %{{.*}} name="t_mirror"
// CHECK:         mpmd.named_computation<"other">
// CHECK-LABEL: func.func private @body(
// CHECK:         mpmd.named_computation<"f"(1)>
// CHECK:         mpmd.named_tensor %{{.*}} name="t"
func.func private @body(%acc: tensor<4xf32>, %x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %g = mpmd.named_computation<"f"(1)> (%x) (%arg: tensor<4xf32>) {
    %r = stablehlo.tanh %arg : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %t = mpmd.named_tensor %g name="t" : tensor<4xf32>
  %h = mpmd.named_computation<"other"> (%t) (%arg: tensor<4xf32>) {
    %r = stablehlo.abs %arg : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %sum = stablehlo.add %acc, %g : tensor<4xf32>
  return %sum, %h : tensor<4xf32>, tensor<4xf32>
}

// -----

// No name in it gets a copy: nothing changes.

// CHECK-LABEL: func.func public @unnamed
// CHECK-NEXT:    mpmd.call @plain
// CHECK-NEXT:    mpmd.call @plain
// CHECK-NEXT:    return
func.func public @unnamed(%x: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %0 = mpmd.call @plain(%x) {call_counter = 0 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %1 = mpmd.call @plain(%0) {call_counter = 1 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

func.func private @plain(%x: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %h = mpmd.named_computation<"other"> (%x) (%arg: tensor<4xf32>) {
    %r = stablehlo.abs %arg : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %h : tensor<4xf32>
}

// -----

// A total that is read after a microbatch of the second half must be whole there: it goes on from call to call.

// CHECK-LABEL: func.func public @running
// CHECK-NEXT:    %[[A:.*]] = mpmd.call @adds(%arg0, %arg1) {call_counter = 0 : ui32}
// CHECK-NEXT:    %[[B:.*]] = mpmd.call @adds(%[[A]], %arg1) {call_counter = 1 : ui32}
// CHECK-NEXT:    %[[C:.*]] = mpmd.call @adds_mirror(%[[B]], %arg1) {call_counter = 2 : ui32}
// CHECK-NEXT:    %[[D:.*]] = mpmd.call @adds_mirror(%[[C]], %arg1) {call_counter = 3 : ui32}
// CHECK-NEXT:    return %[[C]], %[[D]]
func.func public @running(%acc: tensor<4xf32>, %x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %0 = mpmd.call @adds(%acc, %x) {call_counter = 0 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %1 = mpmd.call @adds(%0, %x) {call_counter = 1 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %2 = mpmd.call @adds(%1, %x) {call_counter = 2 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %3 = mpmd.call @adds(%2, %x) {call_counter = 3 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %2, %3 : tensor<4xf32>, tensor<4xf32>
}

func.func private @adds(%acc: tensor<4xf32>, %x: tensor<4xf32>) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %g = mpmd.named_computation<"f"> (%x) (%arg: tensor<4xf32>) {
    %r = stablehlo.tanh %arg : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %sum = stablehlo.add %acc, %g : tensor<4xf32>
  return %sum : tensor<4xf32>
}

// -----

// A total that the microbatch reads, too, goes on from call to call.

// CHECK-LABEL: func.func public @read
// CHECK-NEXT:    %[[A:.*]]:2 = mpmd.call @reads(%arg0, %arg1) {call_counter = 0 : ui32}
// CHECK-NEXT:    %[[B:.*]]:2 = mpmd.call @reads_mirror(%[[A]]#0, %arg1) {call_counter = 1 : ui32}
// CHECK-NEXT:    return %[[B]]#0, %[[B]]#1
func.func public @read(%acc: tensor<4xf32>, %x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %0:2 = mpmd.call @reads(%acc, %x) {call_counter = 0 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %1:2 = mpmd.call @reads(%0#0, %x) {call_counter = 1 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %1#0, %1#1 : tensor<4xf32>, tensor<4xf32>
}

func.func private @reads(%acc: tensor<4xf32>, %x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %g = mpmd.named_computation<"f"> (%x) (%arg: tensor<4xf32>) {
    %r = stablehlo.tanh %arg : tensor<4xf32>
    mpmd.return %r : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  %sum = stablehlo.add %acc, %g : tensor<4xf32>
  %half = stablehlo.tanh %acc : tensor<4xf32>
  return %sum, %half : tensor<4xf32>, tensor<4xf32>
}

// RUN: mpmd-opt %s -mpmd-fold-constant-branches -split-input-file -verify-diagnostics | FileCheck %s

#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func @index_is_computed
// CHECK-NOT: stablehlo.case
// CHECK: mpmd.named_computation<"g"> (%arg0)
// CHECK-NOT: mpmd.named_computation<"f">
func.func @index_is_computed(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %table = stablehlo.constant dense<[3, 1, 2]> : tensor<3xi32>
  %i = stablehlo.constant dense<1> : tensor<i32>
  %entry = stablehlo.dynamic_slice %table, %i, sizes = [1] : (tensor<3xi32>, tensor<i32>) -> tensor<1xi32>
  %at = stablehlo.reshape %entry : (tensor<1xi32>) -> tensor<i32>
  %x = "stablehlo.case"(%at) ({
    %f = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
      mpmd.return %p : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %f : tensor<4xf32>
  }, {
    %g = mpmd.named_computation<"g"> (%a) (%p: tensor<4xf32>) {
      mpmd.return %p : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %g : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %x : tensor<4xf32>
}

// An index out of range chooses the last branch; a branch within the one that is taken is folded too.
// CHECK-LABEL: func.func @nested_and_out_of_range
// CHECK-NEXT: stablehlo.constant
// CHECK-NEXT: stablehlo.constant
// CHECK-NEXT: %[[X:.*]] = stablehlo.negate %arg0
// CHECK-NEXT: return %[[X]]
func.func @nested_and_out_of_range(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %i = stablehlo.constant dense<-7> : tensor<i32>
  %t = stablehlo.constant dense<true> : tensor<i1>
  %x = "stablehlo.case"(%i) ({
    stablehlo.return %a : tensor<4xf32>
  }, {
    %y = "stablehlo.if"(%t) ({
      %n = stablehlo.negate %a : tensor<4xf32>
      stablehlo.return %n : tensor<4xf32>
    }, {
      stablehlo.return %a : tensor<4xf32>
    }) : (tensor<i1>) -> tensor<4xf32>
    stablehlo.return %y : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %x : tensor<4xf32>
}

// A branch without names, or within a computation, may depend on values.
// CHECK-LABEL: func.func @stays
// CHECK: stablehlo.case
// CHECK: mpmd.named_computation<"outer">
// CHECK: stablehlo.case
// CHECK: mpmd.named_computation<"inner">
func.func @stays(%a: tensor<4xf32>, %i: tensor<i32>) -> tensor<4xf32> attributes {topology = #topology} {
  %x = "stablehlo.case"(%i) ({
    stablehlo.return %a : tensor<4xf32>
  }, {
    %n = stablehlo.negate %a : tensor<4xf32>
    stablehlo.return %n : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  %y = mpmd.named_computation<"outer"> (%x, %i) (%p: tensor<4xf32>, %j: tensor<i32>) {
    %z = "stablehlo.case"(%j) ({
      stablehlo.return %p : tensor<4xf32>
    }, {
      %w = mpmd.named_computation<"inner"> (%p) (%q: tensor<4xf32>) {
        mpmd.return %q : tensor<4xf32>
      } : (tensor<4xf32>) -> tensor<4xf32>
      stablehlo.return %w : tensor<4xf32>
    }) : (tensor<i32>) -> tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (tensor<4xf32>, tensor<i32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}

// -----

#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// All calls of a callee give it the same index.
// CHECK-LABEL: func.func @main
func.func @main(%a: tensor<f32>) -> tensor<f32> attributes {topology = #topology} {
  %i = stablehlo.constant dense<0> : tensor<i32>
  %x = mpmd.call @body(%a, %i) {call_counter = 0 : ui32} : (tensor<f32>, tensor<i32>) -> tensor<f32>
  %y = mpmd.call @body(%x, %i) {call_counter = 1 : ui32} : (tensor<f32>, tensor<i32>) -> tensor<f32>
  return %y : tensor<f32>
}

// CHECK-LABEL: func.func private @body
// CHECK-NEXT: %[[X:.*]] = stablehlo.negate %arg0
// CHECK-NEXT: return %[[X]]
func.func private @body(%p: tensor<f32>, %i: tensor<i32>) -> tensor<f32> attributes {topology = #topology} {
  %x = "stablehlo.case"(%i) ({
    %n = stablehlo.negate %p : tensor<f32>
    stablehlo.return %n : tensor<f32>
  }, {
    stablehlo.return %p : tensor<f32>
  }) : (tensor<i32>) -> tensor<f32>
  return %x : tensor<f32>
}

// -----

#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

func.func @known_only_at_run_time(%a: tensor<4xf32>, %i: tensor<i32>, %t: tensor<i1>) -> tensor<4xf32>
    attributes {topology = #topology} {
  %x = "stablehlo.case"(%i) ({
    stablehlo.return %a : tensor<4xf32>
  }, {
    // expected-error@+1 {{named computation 'f' is in branch 1 of 3 (counted from 0) of a lax.switch whose index is not a constant}}
    %f = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
      mpmd.return %p : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %f : tensor<4xf32>
  }, {
    stablehlo.return %a : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  %j = stablehlo.convert %t : (tensor<i1>) -> tensor<i32>
  %y = "stablehlo.case"(%j) ({
    // expected-error@+1 {{named tensor 't' is in the false branch of a lax.cond whose condition is not a constant}}
    %n = mpmd.named_tensor %x name="t" : tensor<4xf32>
    stablehlo.return %n : tensor<4xf32>
  }, {
    // expected-error@+1 {{named computation 'g' is in the true branch of a lax.cond whose condition is not a constant}}
    %g = mpmd.named_computation<"g"> (%x) (%p: tensor<4xf32>) {
      mpmd.return %p : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %g : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}

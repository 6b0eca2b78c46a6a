// RUN: mpmd-opt %s -mpmd-carry-sums-through-calls | FileCheck %s

#topology = #mpmd.topology<<"m1" : <["x"=1]>>>

// The sum of the first results begins with a term, that of the second ones with an argument.

// CHECK-LABEL: func.func public @main
// CHECK-SAME:    (%[[X:[^:]*]]: tensor<4xf32>, %[[S:[^:]*]]: tensor<i32>)
// CHECK-NEXT:    %[[ZERO:.*]] = stablehlo.constant dense<0.000000e+00> : tensor<4xf32>
// CHECK-NEXT:    %[[A:.*]]:3 = mpmd.call @body(%[[X]], %[[ZERO]], %[[S]]) {call_counter = 0 : ui32}
// CHECK-NEXT:    %[[B:.*]]:3 = mpmd.call @body(%[[X]], %[[A]]#0, %[[A]]#1) {call_counter = 1 : ui32}
// CHECK-NEXT:    %[[C:.*]]:3 = mpmd.call @body(%[[X]], %[[B]]#0, %[[B]]#1) {call_counter = 2 : ui32}
// CHECK-NEXT:    return %[[C]]#0, %[[C]]#1, %[[A]]#2
func.func public @main(%x: tensor<4xf32>, %s: tensor<i32>) -> (tensor<4xf32>, tensor<i32>, tensor<4xf32>)
    attributes {topology = #topology} {
  %0:3 = mpmd.call @body(%x) {call_counter = 0 : ui32} : (tensor<4xf32>) -> (tensor<4xf32>, tensor<i32>, tensor<4xf32>)
  %1:3 = mpmd.call @body(%x) {call_counter = 1 : ui32} : (tensor<4xf32>) -> (tensor<4xf32>, tensor<i32>, tensor<4xf32>)
  %2 = stablehlo.add %0#0, %1#0 : tensor<4xf32>
  %3 = stablehlo.add %s, %0#1 : tensor<i32>
  %4 = stablehlo.add %3, %1#1 : tensor<i32>
  %5:3 = mpmd.call @body(%x) {call_counter = 2 : ui32} : (tensor<4xf32>) -> (tensor<4xf32>, tensor<i32>, tensor<4xf32>)
  %6 = stablehlo.add %5#0, %2 : tensor<4xf32>
  %7 = stablehlo.add %4, %5#1 : tensor<i32>
  return %6, %7, %0#2 : tensor<4xf32>, tensor<i32>, tensor<4xf32>
}

// CHECK-LABEL: func.func private @body
// CHECK-SAME:    (%{{.*}}: tensor<4xf32> {mhlo.memory_kind = "device"}, %[[P:[^:]*]]: tensor<4xf32>, %[[Q:[^:]*]]: tensor<i32>)
// CHECK:         %[[D:.*]] = stablehlo.add %[[P]], %[[TERM:.*]] : tensor<4xf32>
// CHECK-NEXT:    %[[E:.*]] = stablehlo.add %[[Q]], %{{.*}} : tensor<i32>
// CHECK-NEXT:    return %[[D]], %[[E]], %[[TERM]]
func.func private @body(%x: tensor<4xf32> {mhlo.memory_kind = "device"}) -> (tensor<4xf32>, tensor<i32>, tensor<4xf32>)
    attributes {topology = #topology} {
  %g = stablehlo.negate %x : tensor<4xf32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  return %g, %one, %g : tensor<4xf32>, tensor<i32>, tensor<4xf32>
}

// A term that is read beside its sum; a callee that is called for something else, too; a sum that begins with
// what is only made behind the first call.

// CHECK-LABEL: func.func public @stays
// CHECK-COUNT-2: mpmd.call @other(%arg0)
// CHECK:         stablehlo.add
// CHECK-COUNT-3: mpmd.call @third(%arg0)
// CHECK:         stablehlo.add
// CHECK-COUNT-2: mpmd.call @fourth(%arg0)
// CHECK-COUNT-2: stablehlo.add
func.func public @stays(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #topology} {
  %0 = mpmd.call @other(%x) {call_counter = 0 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %1 = mpmd.call @other(%x) {call_counter = 1 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %2 = stablehlo.add %0, %1 : tensor<4xf32>
  %3 = mpmd.call @third(%x) {call_counter = 0 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %4 = mpmd.call @third(%x) {call_counter = 1 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %5 = mpmd.call @third(%x) {call_counter = 2 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %6 = stablehlo.add %3, %4 : tensor<4xf32>
  %7 = mpmd.call @fourth(%x) {call_counter = 0 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %8 = stablehlo.negate %x : tensor<4xf32>
  %9 = mpmd.call @fourth(%x) {call_counter = 1 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  %10 = stablehlo.add %8, %7 : tensor<4xf32>
  %11 = stablehlo.add %10, %9 : tensor<4xf32>
  return %0, %2, %5, %6, %11 : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
}
func.func private @other(%x: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  return %x : tensor<4xf32>
}
func.func private @third(%x: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  return %x : tensor<4xf32>
}
func.func private @fourth(%x: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  return %x : tensor<4xf32>
}

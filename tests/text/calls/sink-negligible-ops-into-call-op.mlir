// RUN: mpmd-opt %s -mpmd-sink-negligible-ops-into-call-op -split-input-file | FileCheck %s

// What all calls are given by one op without operands is made inside; unused calls follow.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = mpmd.call @body(%[[ARG0]]) {call_counter = 0 : ui32}
// CHECK-NEXT: %[[V1:.*]] = mpmd.call @body(%[[V0]]) {call_counter = 1 : ui32}
// CHECK-NEXT: %[[V2:.*]] = mpmd.call @body(%[[V0]]) {call_counter = 2 : ui32}
// CHECK-NEXT: return %[[V1]]
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[CST:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT: %[[CST_0:.*]] = stablehlo.constant dense<2.000000e+00> : tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.add %[[ARG0]], %[[CST_0]]
// CHECK-NEXT: %[[V1:.*]] = stablehlo.subtract %[[V0]], %[[CST]]
// CHECK-NEXT: return %[[V1]]
func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %c = stablehlo.constant dense<1.0> : tensor<4xf32>
  %d = stablehlo.constant dense<2.0> : tensor<4xf32>
  %x = mpmd.call @body(%a, %c, %d) {call_counter = 0 : ui32} : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %y = mpmd.call @body(%x, %c, %d) {call_counter = 1 : ui32} : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %z = mpmd.call @body(%x, %c, %d) {call_counter = 2 : ui32} : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
func.func private @body(%p: tensor<4xf32>, %q: tensor<4xf32>, %r: tensor<4xf32>) -> tensor<4xf32>
    attributes {topology = #topology} {
  %s = stablehlo.add %p, %r : tensor<4xf32>
  %t = stablehlo.subtract %s, %q : tensor<4xf32>
  return %t : tensor<4xf32>
}

// -----

// Equal but different constants, and a constant that is returned too.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[CST:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT: %[[CST_0:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT: %[[CST_1:.*]] = stablehlo.constant dense<3.000000e+00> : tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = mpmd.call @body(%[[ARG0]], %[[CST]]) {call_counter = 0 : ui32}
// CHECK-NEXT: %[[V1:.*]] = mpmd.call @body(%[[V0]], %[[CST_0]]) {call_counter = 1 : ui32}
// CHECK-NEXT: return %[[V1]], %[[CST_1]]
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG1:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[CST:.*]] = stablehlo.constant dense<3.000000e+00> : tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.add %[[ARG0]], %[[ARG1]]
// CHECK-NEXT: %[[V1:.*]] = stablehlo.subtract %[[V0]], %[[CST]]
// CHECK-NEXT: return %[[V1]]
func.func public @main(%a: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) attributes {topology = #topology} {
  %c = stablehlo.constant dense<1.0> : tensor<4xf32>
  %d = stablehlo.constant dense<1.0> : tensor<4xf32>
  %e = stablehlo.constant dense<3.0> : tensor<4xf32>
  %x = mpmd.call @body(%a, %c, %e) {call_counter = 0 : ui32} : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %y = mpmd.call @body(%x, %d, %e) {call_counter = 1 : ui32} : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %y, %e : tensor<4xf32>, tensor<4xf32>
}
func.func private @body(%p: tensor<4xf32>, %q: tensor<4xf32>, %r: tensor<4xf32>) -> tensor<4xf32>
    attributes {topology = #topology} {
  %s = stablehlo.add %p, %q : tensor<4xf32>
  %t = stablehlo.subtract %s, %r : tensor<4xf32>
  return %t : tensor<4xf32>
}

// -----

// Values that depend on anything are handed over.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.negate %[[ARG0]]
// CHECK-NEXT: %[[V1:.*]] = mpmd.call @body(%[[ARG0]], %[[V0]])
// CHECK-NEXT: %[[V2:.*]] = mpmd.call @body(%[[V1]], %[[V0]])
// CHECK-NEXT: return %[[V2]]
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG1:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.add %[[ARG0]], %[[ARG1]]
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %n = stablehlo.negate %a : tensor<4xf32>
  %x = mpmd.call @body(%a, %n) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %y = mpmd.call @body(%x, %n) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
func.func private @body(%p: tensor<4xf32>, %q: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %s = stablehlo.add %p, %q : tensor<4xf32>
  return %s : tensor<4xf32>
}

// -----

// Without anything to sink nothing is cleaned up either.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-NEXT: %{{.*}} = stablehlo.negate %arg0
// CHECK-NEXT: %[[V1:.*]] = mpmd.call @body(%arg0)
// CHECK-NEXT: return %[[V1]]
func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %unused = stablehlo.negate %a : tensor<4xf32>
  %x = mpmd.call @body(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %x : tensor<4xf32>
}
func.func private @body(%p: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %s = stablehlo.add %p, %p : tensor<4xf32>
  return %s : tensor<4xf32>
}

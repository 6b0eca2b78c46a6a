// RUN: mpmd-opt %s -mpmd-erase-unused-callee-block-arguments -split-input-file | FileCheck %s

// Arguments that are only returned leave, at a call whose results are unused as well; a chain ends at the first value.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG1:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG2:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.call @body(%[[ARG0]], %[[ARG2]]) {call_counter = 0 : ui32}
// CHECK-NEXT: %[[V1:.*]]:2 = mpmd.call @body(%[[V0]]#0, %[[V0]]#1) {call_counter = 1 : ui32}
// CHECK-NEXT: %[[V2:.*]]:2 = mpmd.call @body(%[[ARG0]], %[[ARG2]]) {call_counter = 2 : ui32}
// CHECK-NEXT: return %[[V1]]#0, %[[ARG1]], %[[V1]]#1
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG1:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.add %[[ARG0]], %[[ARG1]]
// CHECK-NEXT: return %[[V0]], %[[ARG1]]
func.func public @main(%a: tensor<4xf32>, %b: tensor<4xf32>, %c: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #topology} {
  %x, %y, %z = mpmd.call @body(%a, %b, %c) {call_counter = 0 : ui32} : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>)
  %u, %v, %w = mpmd.call @body(%x, %y, %z) {call_counter = 1 : ui32} : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>)
  %p, %q, %r = mpmd.call @body(%a, %b, %c) {call_counter = 2 : ui32} : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>)
  return %u, %v, %w : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
}
func.func private @body(%p: tensor<4xf32>, %q: tensor<4xf32>, %r: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #topology} {
  %s = stablehlo.add %p, %r : tensor<4xf32>
  return %s, %q, %r : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
}

// -----

// A callee of which no result is left goes, with its calls.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG1:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: return %[[ARG0]], %[[ARG1]]
func.func public @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) attributes {topology = #topology} {
  %x, %y = mpmd.call @body(%a, %b) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %y, %x : tensor<4xf32>, tensor<4xf32>
}
func.func private @body(%p: tensor<4xf32>, %q: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #topology} {
  return %q, %p : tensor<4xf32>, tensor<4xf32>
}

// -----

// Every argument is used.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG1:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = mpmd.call @body(%[[ARG0]], %[[ARG1]])
// CHECK-NEXT: return %[[V0]]
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: tensor<4xf32>{{.*}}, %[[ARG1:[^:]*]]: tensor<4xf32>
// CHECK-NEXT: %[[V0:.*]] = stablehlo.subtract %[[ARG1]], %[[ARG0]]
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %x = mpmd.call @body(%a, %b) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %x : tensor<4xf32>
}
func.func private @body(%p: tensor<4xf32>, %q: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %s = stablehlo.subtract %q, %p : tensor<4xf32>
  return %s : tensor<4xf32>
}

// -----

// A callee of which no result is left, but which has effects, is called for them.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @effects
// CHECK:         mpmd.call @shows(%arg0) {call_counter = 0 : ui32}
// CHECK:         return %arg1
func.func public @effects(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %0 = mpmd.call @shows(%a, %b) {call_counter = 0 : ui32} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

func.func private @shows(%p: tensor<4xf32>, %q: tensor<4xf32>) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  stablehlo.custom_call @show(%p) {has_side_effect = true} : (tensor<4xf32>) -> ()
  return %q : tensor<4xf32>
}

// RUN: mpmd-opt %s -mpmd-call-inline -split-input-file | FileCheck %s
// RUN: mpmd-opt %s -mpmd-call-inline='share-bodies=true' -split-input-file | FileCheck %s --check-prefix=SHARED

// Fragments take the attributes of their call, transfers do not; a call whose result nobody uses is inlined too.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 3 : ui32, tag = "left"} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[V1]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[V2]]) {call_counter = 9 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V4:.*]] = mpmd.transfer %[[V3]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V5:.*]] = mpmd.transfer %[[V4]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: return %[[V2]]
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 9 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[V1]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: return %[[V2]]
// SHARED-LABEL: func.func public @main(
// SHARED: func.call
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %x = mpmd.call @body(%a) {call_counter = 3 : ui32, tag = "left"} : (!m1) -> !m1
  %y = mpmd.call @body(%x) : (!m1) -> !m1
  return %x : !m1
}
func.func private @body(%p: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%p) {call_counter = 9 : ui32} (%p_: tensor<4xf32>) {
    %y = stablehlo.add %p_, %p_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2
  %u = mpmd.transfer %t : (!m2) -> !m1
  return %u : !m1
}

// -----

// A callee that calls nothing and is not called stays as it is.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: return %[[ARG0]]
// CHECK-LABEL: func.func private @body(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V1]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  return %a : !m1
}
func.func private @body(%p: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%p) (%p_: tensor<4xf32>) {
    %y = stablehlo.add %p_, %p_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

// Fragments in a loop of the callee too.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main
// CHECK-NEXT:  mpmd.for (%arg0)
// CHECK-NEXT:    mpmd.fragment<mesh="m1", origin=["f"]> (%{{.*}}) {call_counter = 3 : ui32}
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %x = mpmd.call @body(%a) {call_counter = 3 : ui32} : (!m1) -> !m1
  return %x : !m1
}
func.func private @body(%p: !m1) -> !m1 attributes {topology = #topology} {
  %l = mpmd.for (%p) {iterations = 2 : ui32, unroll_factor = 2 : ui32} (%q: !m1, %i: !mpmd.mesh_tensor<"m1", tensor<ui32>>) {
    %f = mpmd.fragment<mesh="m1", origin=["f"]> (%q) (%r: tensor<4xf32>) {
      %s = stablehlo.add %r, %r : tensor<4xf32>
      mpmd.return %s : tensor<4xf32>
    } : (!m1) -> !m1
    mpmd.return %f : !m1
  } : !m1
  return %l : !m1
}

// RUN: mpmd-opt %s -mpmd-merge-inferred-fragments=keep-microbatches-equal=true -split-input-file \
// RUN:   | FileCheck %s

// Work that belongs to no microbatch stays out of the microbatches.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[ARG0]]) {mpmd.inferred_by = ["w"]} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[V0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[V0]]) {call_counter = 1 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.exponential %[[ARG1]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[V3]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]], %[[V2]]
func.func public @main(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%i) {call_counter = 0 : ui32} (%i_: tensor<4xf32>) {
    %x = stablehlo.negate %i_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %j = mpmd.fragment<mesh="m1", origin=[]> (%i) {call_counter = 1 : ui32, mpmd.inferred_by = ["w"]} (%i_: tensor<4xf32>) {
    %x = stablehlo.exponential %i_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["f"]> (%j) {call_counter = 1 : ui32} (%j_: tensor<4xf32>) {
    %x = stablehlo.negate %j_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %g : !m1, !m1
}

// -----

// One microbatch has no other to be equal to.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) {call_counter = 0 : ui32} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.negate %[[V1]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%i) {call_counter = 0 : ui32} (%i_: tensor<4xf32>) {
    %x = stablehlo.negate %i_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

// m2 waits for n, the last work waits for m2: as one, m2 would wait for its own value.  A value of the start
// is there: it makes nothing wait.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func.func public @what_others_wait_for(
// CHECK:       %[[N:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%{{[^,]*}}) {mpmd.inferred_by = ["w"]}
// CHECK-NEXT:    stablehlo.add
// CHECK-NEXT:    mpmd.return
// CHECK-NEXT:  }
// CHECK-NEXT:  mpmd.transfer %[[N]]
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=[]> (%[[N]], %{{.*}}) {mpmd.inferred_by = ["w"]}
// CHECK-NEXT:    stablehlo.multiply
func.func public @what_others_wait_for(%a: !m1, %b: !m2) -> (!m1, !m1, !m2, !m2) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    %x = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m2", origin=["f"]> (%b) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    %x = stablehlo.exponential %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m2) -> !m2
  %s = mpmd.transfer %g : (!m2) -> !m1
  %n = mpmd.fragment<mesh="m1", origin=[]> (%f) {mpmd.inferred_by = ["w"]} (%p: tensor<4xf32>) {
    %x = stablehlo.add %p, %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %n : (!m1) -> !m2
  %u = mpmd.fragment<mesh="m1", origin=[]> (%n, %s) {mpmd.inferred_by = ["w"]} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %x = stablehlo.multiply %p, %q : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %f, %u, %g, %t : !m1, !m1, !m2, !m2
}

// CHECK-LABEL: func.func public @what_is_there(
// CHECK:       mpmd.fragment<mesh="m1", origin=[]>
// CHECK-NEXT:    stablehlo.add
// CHECK-NEXT:    stablehlo.multiply
func.func public @what_is_there(%a: !m1, %b: !m2) -> (!m1, !m1, !m2, !m2) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0 : ui32} (%p: tensor<4xf32>) {
    %x = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m2", origin=["f"]> (%b) {call_counter = 1 : ui32} (%p: tensor<4xf32>) {
    %x = stablehlo.exponential %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m2) -> !m2
  %s = mpmd.transfer %b : (!m2) -> !m1
  %n = mpmd.fragment<mesh="m1", origin=[]> (%f) {mpmd.inferred_by = ["w"]} (%p: tensor<4xf32>) {
    %x = stablehlo.add %p, %p : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %n : (!m1) -> !m2
  %u = mpmd.fragment<mesh="m1", origin=[]> (%n, %s) {mpmd.inferred_by = ["w"]} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %x = stablehlo.multiply %p, %q : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %f, %u, %g, %t : !m1, !m1, !m2, !m2
}

// RUN: mpmd-opt %s -mpmd-combine-before-transfer -split-input-file | FileCheck %s

// Three values of m1 that are only summed on m0: the sum is sent.

!m0 = !mpmd.mesh_tensor<"m0", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m0" : <["x"=2]>>, <"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @sum
// CHECK-SAME: (%[[A:[^:]*]]: {{[^,]*}}, {{[^,]*}}, %[[B:[^:]*]]: {{[^,]*}}, {{[^,]*}}, %[[C:[^:]*]]:
// CHECK-NEXT: %[[F:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[A]], %[[B]]) {call_counter = 3 : ui32, mpmd.inferred_by = ["w"]}
// CHECK-NEXT:   stablehlo.add
// CHECK:      %[[G:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[F]], %[[C]])
// CHECK:      %[[T:.*]] = mpmd.transfer %[[G]]
// CHECK-NEXT: return %[[T]]
func.func public @sum(%a: !m1, %b: !m1, %c: !m1) -> !m0 attributes {topology = #topology} {
  %s = mpmd.transfer %a : (!m1) -> !m0
  %t = mpmd.transfer %b : (!m1) -> !m0
  %u = mpmd.transfer %c : (!m1) -> !m0
  %f = mpmd.fragment<mesh="m0", origin=[]> (%s, %t) {call_counter = 3 : ui32, mpmd.inferred_by = ["w"]} (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m0, !m0) -> !m0
  %g = mpmd.fragment<mesh="m0", origin=[]> (%f, %u) (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m0, !m0) -> !m0
  return %g : !m0
}

// -----

// Left alone: a named fragment, one whose operand is needed otherwise, one that reads two meshes, one that
// would send more bytes.

!m0 = !mpmd.mesh_tensor<"m0", tensor<4xf32>>
!big = !mpmd.mesh_tensor<"m0", tensor<9xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m0" : <["x"=2]>>, <"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func.func public @left_alone
// CHECK-NOT: mpmd.fragment<mesh="m1"
// CHECK-NOT: mpmd.fragment<mesh="m2"
// CHECK: return
func.func public @left_alone(%a: !m1, %b: !m1, %c: !m2) -> (!m0, !m0, !m0, !m0, !big)
    attributes {topology = #topology} {
  %a0 = mpmd.transfer %a : (!m1) -> !m0
  %b0 = mpmd.transfer %b : (!m1) -> !m0
  %named = mpmd.fragment<mesh="m0", origin=["f"]> (%a0, %b0) (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m0, !m0) -> !m0
  %a1 = mpmd.transfer %a : (!m1) -> !m0
  %b1 = mpmd.transfer %b : (!m1) -> !m0
  %needed = mpmd.fragment<mesh="m0", origin=[]> (%a1, %b1) (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m0, !m0) -> !m0
  %a2 = mpmd.transfer %a : (!m1) -> !m0
  %c2 = mpmd.transfer %c : (!m2) -> !m0
  %two = mpmd.fragment<mesh="m0", origin=[]> (%a2, %c2) (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m0, !m0) -> !m0
  %a3 = mpmd.transfer %a : (!m1) -> !m0
  %b3 = mpmd.transfer %b : (!m1) -> !m0
  %wide = mpmd.fragment<mesh="m0", origin=[]> (%a3, %b3) (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %k = stablehlo.constant dense<1.0> : tensor<1xf32>
    %z = stablehlo.concatenate %x, %y, %k, dim = 0 : (tensor<4xf32>, tensor<4xf32>, tensor<1xf32>) -> tensor<9xf32>
    mpmd.return %z : tensor<9xf32>
  } : (!m0, !m0) -> !big
  return %named, %needed, %two, %b1, %wide : !m0, !m0, !m0, !m0, !big
}

// -----

// What has effects stays on its mesh, and what is to be in host memory.

!m0 = !mpmd.mesh_tensor<"m0", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!host = !mpmd.mesh_tensor<"m0", tensor<4xf32>, memory_kind="pinned_host">

// CHECK-LABEL: func.func public @effects
// CHECK-NOT:   mpmd.fragment<mesh="m1"
// CHECK:       {{^ *return}}
func.func public @effects(%a: !m1, %b: !m1) -> (!m0, !host) attributes {topology = #mpmd.topology<<"m0" : <["x"=2]>>, <"m1" : <["x"=2]>>>} {
  %a0 = mpmd.transfer %a : (!m1) -> !m0
  %b0 = mpmd.transfer %b : (!m1) -> !m0
  %f = mpmd.fragment<mesh="m0", origin=[]> (%a0, %b0) (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.custom_call @draw(%x, %y) {has_side_effect = true} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m0, !m0) -> !m0
  %a1 = mpmd.transfer %a : (!m1) -> !m0
  %b1 = mpmd.transfer %b : (!m1) -> !m0
  %g = mpmd.fragment<mesh="m0", origin=[]> (%a1, %b1) (%x: tensor<4xf32>, %y: tensor<4xf32>) {
    %z = stablehlo.add %x, %y : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m0, !m0) -> !host
  return %f, %g : !m0, !host
}

// RUN: mpmd-opt %s -mpmd-merge-inferred-fragments=merge-sideways=true -split-input-file | FileCheck %s

// With the next fragment of the mesh, which need not use anything of it; other meshes do not count.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG2:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m2", origin=["k"]> (%[[ARG2]]) (%[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.abs %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG1]], %[[ARG0]]) (%[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.negate %[[ARG3]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[ARG4]], %[[ARG4]]
// CHECK-NEXT:   mpmd.return %[[V2]], %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]]#1, %[[V1]]#0, %[[V0]]
func.func public @main(%a: !m1, %b: !m1, %c: !m2) -> (!m1, !m1, !m2) attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%b) {mpmd.inferred_by = ["w"]} (%b_: tensor<4xf32>) {
    %z = stablehlo.negate %b_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1) -> !m1
  %k = mpmd.fragment<mesh="m2", origin=["k"]> (%c) (%c_: tensor<4xf32>) {
    %z = stablehlo.abs %c_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m2) -> !m2
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %i, %k : !m1, !m1, !m2
}

// -----

// A user in between that cannot be passed.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=[]> (%[[ARG0]]) {mpmd.inferred_by = ["w"]} (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[V1]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[V2]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V3]], %[[V1]]
func.func public @main(%a: !m1) -> (!m1, !m2) attributes {topology = #topology} {
  %i = mpmd.fragment<mesh="m1", origin=[]> (%a) {mpmd.inferred_by = ["w"]} (%a_: tensor<4xf32>) {
    %z = stablehlo.negate %a_ : tensor<4xf32>
    mpmd.return %z : tensor<4xf32>
  } : (!m1) -> !m1
  %t = mpmd.transfer %i : (!m1) -> !m2
  %s = mpmd.transfer %t : (!m2) -> !m1
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%s) (%s_: tensor<4xf32>) {
    %x = stablehlo.add %s_, %s_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %t : !m1, !m2
}

// RUN: mpmd-opt %s -mpmd-fragment-dedup -split-input-file | FileCheck %s

// Equal results become one, and then the equal operands of the next fragment.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:3 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG1]], %[[ARG0]], %[[ARG1]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.subtract %[[ARG3]], %[[ARG2]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.multiply %[[V2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V3]], %[[V2]], %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["g"]> (%[[V0]]#0, %[[V0]]#1, %[[V0]]#0) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.subtract %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[V2]], %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]]
func.func public @main(%a: !m1, %b: !m1) -> !m1 attributes {topology = #topology} {
  %f, %g, %h = mpmd.fragment<mesh="m1", origin=["f"]> (%b, %a, %b) (%b_: tensor<4xf32>, %a_: tensor<4xf32>, %q: tensor<4xf32>) {
    %x = stablehlo.subtract %a_, %q : tensor<4xf32>
    %y = stablehlo.multiply %x, %b_ : tensor<4xf32>
    mpmd.return %y, %x, %y : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1, !m1) -> (!m1, !m1, !m1)
  %k = mpmd.fragment<mesh="m1", origin=["g"]> (%h, %g, %f) (%h_: tensor<4xf32>, %g_: tensor<4xf32>, %f_: tensor<4xf32>) {
    %z = stablehlo.subtract %h_, %f_ : tensor<4xf32>
    %w = stablehlo.add %z, %g_ : tensor<4xf32>
    mpmd.return %w : tensor<4xf32>
  } : (!m1, !m1, !m1) -> !m1
  return %k : !m1
}

// -----

// One value in two kinds of memory is two results.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m1_pinned_host = !mpmd.mesh_tensor<"m1", tensor<4xf32>, memory_kind="pinned_host">
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V1]], %[[V1]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]#0, %[[V0]]#1
func.func public @main(%a: !m1) -> (!m1, !m1_pinned_host) attributes {topology = #topology} {
  %f, %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.negate %a_ : tensor<4xf32>
    mpmd.return %x, %x : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!m1, !m1_pinned_host)
  return %f, %g : !m1, !m1_pinned_host
}

// RUN: mpmd-opt %s -mpmd-split-and-prioritize-transfer-independent-computations -split-input-file \
// RUN:   | FileCheck %s

// What does not wait comes first; constants and what it passes on become residuals.

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m2"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.transfer %[[ARG1]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V1:.*]]:4 = mpmd.fragment<mesh="m2", origin=["f"]> (%[[ARG0]], %[[V0]]) {call_counter = 1 : ui32, split_keep_transferred} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V3]], %[[ARG3]], %[[CST]], %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]]:2 = mpmd.fragment<mesh="m2", origin=["f"]> (%[[ARG0]], %[[V0]], %[[V1]]#1, %[[V1]]#2, %[[V1]]#3) {call_counter = 1 : ui32, split_drop_transferred} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]{{.*}}, %[[ARG5:[^:]*]]{{.*}}, %[[ARG6:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[ARG6]], %[[ARG4]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.multiply %[[V3]], %[[ARG5]]
// CHECK-NEXT:   mpmd.return %[[V4]], %[[ARG4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]]#0, %[[V2]]#0, %[[V2]]#1
func.func public @main(%a: !m2, %b: !m1) -> (!m2, !m2, !m2) attributes {topology = #topology} {
  %t = mpmd.transfer %b : (!m1) -> !m2
  %f, %g, %h = mpmd.fragment<mesh="m2", origin=["f"]> (%a, %t) {call_counter = 1 : ui32} (%a_: tensor<4xf32>, %t_: tensor<4xf32>) {
    %c = stablehlo.constant dense<1.0> : tensor<4xf32>
    %x = stablehlo.negate %a_ : tensor<4xf32>
    %y = stablehlo.add %x, %t_ : tensor<4xf32>
    %z = stablehlo.multiply %y, %c : tensor<4xf32>
    mpmd.return %x, %z, %t_ : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
  } : (!m2, !m2) -> (!m2, !m2, !m2)
  return %f, %g, %h : !m2, !m2, !m2
}

// -----

// All operands come from transfers, none does, and halves.

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m2"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.transfer %[[ARG1]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m2", origin=["f"]> (%[[V0]], %[[V0]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[CST]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m2", origin=["f"]> (%[[ARG0]], %[[V1]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG2]], %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]]:2 = mpmd.fragment<mesh="m2", origin=["f"]> (%[[ARG0]], %[[V0]]) {split_drop_transferred} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[ARG2]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.add %[[V4]], %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V4]], %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]], %[[V2]], %[[V3]]#0, %[[V3]]#1
func.func public @main(%a: !m2, %b: !m1) -> (!m2, !m2, !m2, !m2) attributes {topology = #topology} {
  %t = mpmd.transfer %b : (!m1) -> !m2
  %f = mpmd.fragment<mesh="m2", origin=["f"]> (%t, %t) (%t_: tensor<4xf32>, %q: tensor<4xf32>) {
    %c = stablehlo.constant dense<1.0> : tensor<4xf32>
    %y = stablehlo.add %c, %t_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m2, !m2) -> !m2
  %g = mpmd.fragment<mesh="m2", origin=["f"]> (%a, %f) (%a_: tensor<4xf32>, %f_: tensor<4xf32>) {
    %y = stablehlo.add %a_, %f_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m2, !m2) -> !m2
  %h, %i = mpmd.fragment<mesh="m2", origin=["f"]> (%a, %t) {split_drop_transferred} (%a_: tensor<4xf32>, %t_: tensor<4xf32>) {
    %x = stablehlo.negate %a_ : tensor<4xf32>
    %y = stablehlo.add %x, %t_ : tensor<4xf32>
    mpmd.return %x, %y : tensor<4xf32>, tensor<4xf32>
  } : (!m2, !m2) -> (!m2, !m2)
  return %f, %g, %h, %i : !m2, !m2, !m2, !m2
}

// -----

// Everything waits.

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m2"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.transfer %[[ARG1]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m2", origin=["f"]> (%[[ARG0]], %[[V0]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.add %[[ARG2]], %[[ARG3]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]]
func.func public @main(%a: !m2, %b: !m1) -> !m2 attributes {topology = #topology} {
  %t = mpmd.transfer %b : (!m1) -> !m2
  %f = mpmd.fragment<mesh="m2", origin=["f"]> (%a, %t) (%a_: tensor<4xf32>, %t_: tensor<4xf32>) {
    %y = stablehlo.add %a_, %t_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m2, !m2) -> !m2
  return %f : !m2
}

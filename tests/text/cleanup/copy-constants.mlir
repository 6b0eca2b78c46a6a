// RUN: mpmd-opt %s -mpmd-copy-constants -split-input-file | FileCheck %s

// A constant is remade on the other side of a transfer; what brought it is left.

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m3 = !mpmd.mesh_tensor<"m3", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["make"]> () () {
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<3.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   mpmd.return %[[CST]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m3"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[V1]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m2", origin=["use"]> (%[[ARG0]], %[[V2]]) (%[[ARG1:[^:]*]]{{.*}}, %[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<3.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.subtract %[[ARG1]], %[[CST]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V3]]
func.func public @main(%b: !m2) -> !m2 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["make"]> () () {
    %c = stablehlo.constant dense<3.0> : tensor<4xf32>
    mpmd.return %c : tensor<4xf32>
  } : () -> !m1
  %s = mpmd.transfer %f : (!m1) -> !m3
  %t = mpmd.transfer %s : (!m3) -> !m2
  %g = mpmd.fragment<mesh="m2", origin=["use"]> (%b, %t) (%b_: tensor<4xf32>, %t_: tensor<4xf32>) {
    %y = stablehlo.subtract %b_, %t_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m2, !m2) -> !m2
  return %g : !m2
}

// -----

// Several constants of one fragment come in reverse order of the operands.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["make"]> () () {
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[CST_0:.*]] = stablehlo.constant dense<2.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   mpmd.return %[[CST]], %[[CST_0]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["use"]> (%[[V0]]#0, %[[ARG0]], %[[V0]]#1) (%[[ARG1:[^:]*]]{{.*}}, %[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<2.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[CST_0:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.multiply %[[CST_0]], %[[ARG2]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.add %[[V2]], %[[CST]]
// CHECK-NEXT:   mpmd.return %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]]
func.func public @main(%b: !m1) -> !m1 attributes {topology = #topology} {
  %f, %g = mpmd.fragment<mesh="m1", origin=["make"]> () () {
    %c = stablehlo.constant dense<1.0> : tensor<4xf32>
    %d = stablehlo.constant dense<2.0> : tensor<4xf32>
    mpmd.return %c, %d : tensor<4xf32>, tensor<4xf32>
  } : () -> (!m1, !m1)
  %h = mpmd.fragment<mesh="m1", origin=["use"]> (%f, %b, %g) (%f_: tensor<4xf32>, %b_: tensor<4xf32>, %g_: tensor<4xf32>) {
    %x = stablehlo.multiply %f_, %b_ : tensor<4xf32>
    %y = stablehlo.add %x, %g_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1, !m1, !m1) -> !m1
  return %h : !m1
}

// -----

// Computed values, arguments and constants that went through another op are left alone.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["make"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.negate %[[CST]]
// CHECK-NEXT:   mpmd.return %[[V2]], %[[ARG1]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.fragment<mesh="m1", origin=["use"]> (%[[V0]]#0, %[[V0]]#1) (%[[ARG1:[^:]*]]{{.*}}, %[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V2:.*]] = stablehlo.multiply %[[ARG1]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V2]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V1]]
func.func public @main(%b: !m1) -> !m1 attributes {topology = #topology} {
  %f, %g = mpmd.fragment<mesh="m1", origin=["make"]> (%b) (%b_: tensor<4xf32>) {
    %c = stablehlo.constant dense<1.0> : tensor<4xf32>
    %d = stablehlo.negate %c : tensor<4xf32>
    mpmd.return %d, %b_ : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!m1, !m1)
  %h = mpmd.fragment<mesh="m1", origin=["use"]> (%f, %g) (%f_: tensor<4xf32>, %g_: tensor<4xf32>) {
    %x = stablehlo.multiply %f_, %g_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %h : !m1
}

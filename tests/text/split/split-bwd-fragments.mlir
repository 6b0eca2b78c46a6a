// RUN: mpmd-opt %s -mpmd-split-bwd-fragments -split-input-file | FileCheck %s

// What is transferred first; the rest gets what it needs handed over, and a constant of its own where nobody else needs it.

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m2"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]]:3 = mpmd.fragment<mesh="m2", origin=["f"(1)], stage=1> (%[[ARG0]], %[[ARG1]]) {call_counter = 0 : ui32, split_keep_transferred} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[ARG3]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.multiply %[[V3]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V4]], %[[ARG2]], %[[V3]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]]:2 = mpmd.fragment<mesh="m2", origin=["f"(1)], stage=1> (%[[ARG0]], %[[ARG1]], %[[V0]]#1, %[[V0]]#2) {call_counter = 0 : ui32, split_drop_transferred} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]{{.*}}, %[[ARG5:[^:]*]]
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<2.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.multiply %[[ARG5]], %[[CST]]
// CHECK-NEXT:   mpmd.return %[[V3]], %[[ARG4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[V0]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: return %[[V1]]#0, %[[V2]], %[[V1]]#1
func.func public @main(%w: !m2, %g: !m2) -> (!m2, !m1, !m2) attributes {topology = #topology} {
  %dw, %dx, %du = mpmd.fragment<mesh="m2", origin=["f"(1)], stage=1> (%w, %g) {call_counter = 0 : ui32} (%w_: tensor<4xf32>, %g_: tensor<4xf32>) {
    %s = stablehlo.negate %g_ : tensor<4xf32>
    %c = stablehlo.constant dense<2.0> : tensor<4xf32>
    %a = stablehlo.multiply %s, %w_ : tensor<4xf32>
    %b = stablehlo.multiply %s, %c : tensor<4xf32>
    mpmd.return %b, %a, %w_ : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
  } : (!m2, !m2) -> (!m2, !m2, !m2)
  %t = mpmd.transfer %dx : (!m2) -> !m1
  return %dw, %t, %du : !m2, !m1, !m2
}

// -----

// Residuals begin with the last result and the last operand; what both need is computed first.

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m2"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]]:4 = mpmd.fragment<mesh="m2", origin=["f"(1)]> (%[[ARG0]], %[[ARG1]]) {split_keep_transferred} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.negate %[[ARG3]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.abs %[[ARG2]]
// CHECK-NEXT:   %[[CST:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.multiply %[[V3]], %[[V4]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.add %[[V5]], %[[CST]]
// CHECK-NEXT:   mpmd.return %[[V6]], %[[V3]], %[[V4]], %[[CST]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]]:2 = mpmd.fragment<mesh="m2", origin=["f"(1)]> (%[[ARG0]], %[[ARG1]], %[[V0]]#1, %[[V0]]#2, %[[V0]]#3) {split_drop_transferred} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]{{.*}}, %[[ARG5:[^:]*]]{{.*}}, %[[ARG6:[^:]*]]
// CHECK-NEXT:   %[[V3:.*]] = stablehlo.subtract %[[ARG4]], %[[ARG5]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.add %[[ARG6]], %[[V3]]
// CHECK-NEXT:   mpmd.return %[[V4]], %[[ARG4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[V0]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: return %[[V1]]#0, %[[V2]], %[[V1]]#1
func.func public @main(%w: !m2, %g: !m2) -> (!m2, !m1, !m2) attributes {topology = #topology} {
  %x, %y, %z = mpmd.fragment<mesh="m2", origin=["f"(1)]> (%w, %g) (%w_: tensor<4xf32>, %g_: tensor<4xf32>) {
    %p = stablehlo.negate %g_ : tensor<4xf32>
    %q = stablehlo.abs %w_ : tensor<4xf32>
    %c = stablehlo.constant dense<1.0> : tensor<4xf32>
    %r = stablehlo.multiply %p, %q : tensor<4xf32>
    %s = stablehlo.add %r, %c : tensor<4xf32>
    %u = stablehlo.subtract %p, %q : tensor<4xf32>
    %v = stablehlo.add %c, %u : tensor<4xf32>
    mpmd.return %v, %s, %p : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
  } : (!m2, !m2) -> (!m2, !m2, !m2)
  %t = mpmd.transfer %y : (!m2) -> !m1
  return %x, %t, %z : !m2, !m1, !m2
}

// -----

// Forward work, work that is all sent, work that is not sent at all, and halves are left alone.

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m2"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m2", origin=["f"]> (%[[ARG0]], %[[ARG1]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V8:.*]] = stablehlo.negate %[[ARG3]]
// CHECK-NEXT:   %[[V9:.*]] = stablehlo.abs %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V8]], %[[V9]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V2:.*]]:2 = mpmd.fragment<mesh="m2", origin=["f"(1)]> (%[[ARG0]], %[[ARG1]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V8:.*]] = stablehlo.negate %[[ARG3]]
// CHECK-NEXT:   %[[V9:.*]] = stablehlo.abs %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V8]], %[[V9]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.transfer %[[V2]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V4:.*]] = mpmd.transfer %[[V2]]#1 : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V5:.*]]:2 = mpmd.fragment<mesh="m2", origin=["g"(1)]> (%[[ARG0]], %[[ARG1]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V8:.*]] = stablehlo.negate %[[ARG3]]
// CHECK-NEXT:   %[[V9:.*]] = stablehlo.abs %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V8]], %[[V9]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V6:.*]]:2 = mpmd.fragment<mesh="m2", origin=["h"(1)]> (%[[ARG0]], %[[ARG1]]) {split_keep_transferred} (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V8:.*]] = stablehlo.negate %[[ARG3]]
// CHECK-NEXT:   %[[V9:.*]] = stablehlo.abs %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V8]], %[[V9]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V7:.*]] = mpmd.transfer %[[V6]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: return %[[V0]]#1, %[[V1]], %[[V3]], %[[V4]], %[[V5]]#0, %[[V5]]#1, %[[V6]]#1, %[[V7]]
func.func public @main(%w: !m2, %g: !m2) -> (!m2, !m1, !m1, !m1, !m2, !m2, !m2, !m1) attributes {topology = #topology} {
  %a, %b = mpmd.fragment<mesh="m2", origin=["f"]> (%w, %g) (%w_: tensor<4xf32>, %g_: tensor<4xf32>) {
    %x = stablehlo.negate %g_ : tensor<4xf32>
    %y = stablehlo.abs %w_ : tensor<4xf32>
    mpmd.return %x, %y : tensor<4xf32>, tensor<4xf32>
  } : (!m2, !m2) -> (!m2, !m2)
  %s = mpmd.transfer %a : (!m2) -> !m1
  %c, %d = mpmd.fragment<mesh="m2", origin=["f"(1)]> (%w, %g) (%w_: tensor<4xf32>, %g_: tensor<4xf32>) {
    %x = stablehlo.negate %g_ : tensor<4xf32>
    %y = stablehlo.abs %w_ : tensor<4xf32>
    mpmd.return %x, %y : tensor<4xf32>, tensor<4xf32>
  } : (!m2, !m2) -> (!m2, !m2)
  %t = mpmd.transfer %c : (!m2) -> !m1
  %u = mpmd.transfer %d : (!m2) -> !m1
  %e, %f = mpmd.fragment<mesh="m2", origin=["g"(1)]> (%w, %g) (%w_: tensor<4xf32>, %g_: tensor<4xf32>) {
    %x = stablehlo.negate %g_ : tensor<4xf32>
    %y = stablehlo.abs %w_ : tensor<4xf32>
    mpmd.return %x, %y : tensor<4xf32>, tensor<4xf32>
  } : (!m2, !m2) -> (!m2, !m2)
  %h, %i = mpmd.fragment<mesh="m2", origin=["h"(1)]> (%w, %g) {split_keep_transferred} (%w_: tensor<4xf32>, %g_: tensor<4xf32>) {
    %x = stablehlo.negate %g_ : tensor<4xf32>
    %y = stablehlo.abs %w_ : tensor<4xf32>
    mpmd.return %x, %y : tensor<4xf32>, tensor<4xf32>
  } : (!m2, !m2) -> (!m2, !m2)
  %v = mpmd.transfer %h : (!m2) -> !m1
  return %b, %s, %t, %u, %e, %f, %i, %v : !m2, !m1, !m1, !m1, !m2, !m2, !m2, !m1
}

// -----

// All ops are needed for what is sent: nothing is split and nothing is marked, whatever stands around.

!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m2"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m2", origin=["f"(1)]> (%[[ARG0]], %[[ARG1]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[ARG3]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.multiply %[[V4]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V4]], %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]]#1 : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V2:.*]] = mpmd.fragment<mesh="m2", origin=["k"]> (%[[ARG0]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.negate %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V3:.*]] = mpmd.fragment<mesh="m2", origin=["l"]> (%[[ARG0]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V4:.*]] = stablehlo.abs %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]#0, %[[V1]], %[[V2]], %[[V3]]
func.func public @main(%w: !m2, %g: !m2) -> (!m2, !m1, !m2, !m2) attributes {topology = #topology} {
  %a, %b = mpmd.fragment<mesh="m2", origin=["f"(1)]> (%w, %g) (%w_: tensor<4xf32>, %g_: tensor<4xf32>) {
    %x = stablehlo.negate %g_ : tensor<4xf32>
    %y = stablehlo.multiply %x, %w_ : tensor<4xf32>
    mpmd.return %x, %y : tensor<4xf32>, tensor<4xf32>
  } : (!m2, !m2) -> (!m2, !m2)
  %s = mpmd.transfer %b : (!m2) -> !m1
  %k = mpmd.fragment<mesh="m2", origin=["k"]> (%w) (%w_: tensor<4xf32>) {
    %x = stablehlo.negate %w_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m2) -> !m2
  %l = mpmd.fragment<mesh="m2", origin=["l"]> (%w) (%w_: tensor<4xf32>) {
    %x = stablehlo.abs %w_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m2) -> !m2
  return %a, %s, %k, %l : !m2, !m1, !m2, !m2
}

// -----

// A token would pass from one half to the other, and fragments pass arrays only: the order of effects stays in one fragment.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

// CHECK-LABEL: func.func public @ordered
// CHECK-NOT:   split_keep_transferred
// CHECK:       {{^ *return}}
func.func public @ordered(%a: !m1) -> (!m1, !m2) attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>, <"m2" : <["x"=1]>>>} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"(1)]> (%a) (%p: tensor<4xf32>) {
    %t = stablehlo.create_token : !stablehlo.token
    %x, %u = stablehlo.custom_call @read(%p, %t) {has_side_effect = true} : (tensor<4xf32>, !stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)
    %y, %v = stablehlo.custom_call @read(%p, %u) {has_side_effect = true} : (tensor<4xf32>, !stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)
    mpmd.return %x, %y : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!m1, !m1)
  %s = mpmd.transfer %f#0 : (!m1) -> !m2
  return %f#1, %s : !m1, !m2
}

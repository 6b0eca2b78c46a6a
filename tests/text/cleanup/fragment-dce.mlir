// RUN: mpmd-opt %s -mpmd-fragment-dce -split-input-file -allow-unregistered-dialect | FileCheck %s

// An unused result goes, then the ops and the operand that it needed; a transfer that nothing uses goes first.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG2:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]], %[[ARG2]]) {arg_attrs = [{k = 0 : i64}, {k = 2 : i64}], call_counter = 3 : ui32, res_attrs = [{k = 0 : i64}, {k = 2 : i64}]} (%[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG3]], %[[ARG4]]
// CHECK-NEXT:   mpmd.return %[[V1]], %[[ARG4]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]#0, %[[V0]]#1
func.func public @main(%a: !m1, %b: !m1, %c: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f, %g, %h = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b, %c) {call_counter = 3 : ui32, arg_attrs = [{k = 0}, {k = 1}, {k = 2}], res_attrs = [{k = 0}, {k = 1}, {k = 2}]} (%a_: tensor<4xf32>, %b_: tensor<4xf32>, %c_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %c_ : tensor<4xf32>
    %y = stablehlo.multiply %b_, %b_ : tensor<4xf32>
    %z = stablehlo.negate %y : tensor<4xf32>
    mpmd.return %x, %z, %c_ : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1, !m1) -> (!m1, !m1, !m1)
  %t = mpmd.transfer %g : (!m1) -> !m2
  return %f, %h : !m1, !m1
}

// -----

// A chain of unused fragments vanishes; values used by an op with an effect stay.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: mpmd.fragment<mesh="m1", origin=["log"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V0:.*]] = stablehlo.tanh %[[ARG1]]
// CHECK-NEXT:   stablehlo.custom_call @log(%[[V0]]) {has_side_effect = true}
// CHECK-NEXT:   mpmd.return
// CHECK-NEXT: }
// CHECK-NEXT: return %[[ARG0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%f_: tensor<4xf32>) {
    %x = stablehlo.negate %f_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["log"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.tanh %a_ : tensor<4xf32>
    stablehlo.custom_call @log(%x) {has_side_effect = true} : (tensor<4xf32>) -> ()
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %a : !m1
}

// -----

// Nothing to drop.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V1:.*]] = stablehlo.add %[[ARG1]], %[[ARG1]]
// CHECK-NEXT:   mpmd.return %[[V1]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V0]]
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

// What an op of an unknown dialect does is not known: it stays.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-NEXT: mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) (%[[ARG1:[^:]*]]: tensor<4xf32>) {
// CHECK-NEXT:   "field.touch"(%[[ARG1]])
// CHECK-NEXT:   mpmd.return
// CHECK-NEXT: }
// CHECK-NEXT: return %arg0
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = "field.touch"(%a_) : (tensor<4xf32>) -> tensor<4xf32>
    %y = stablehlo.negate %a_ : tensor<4xf32>
    mpmd.return %y : tensor<4xf32>
  } : (!m1) -> !m1
  return %a : !m1
}

// -----

// An unused sharding constraint says how its operand is sharded, and stays as long as that is used.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>
sdy.mesh @mesh = <["x"=2]>

// CHECK-LABEL: func.func public @constrained(
// CHECK:       mpmd.fragment
// CHECK-NEXT:    %[[X:.*]] = stablehlo.negate
// CHECK-NEXT:    sdy.sharding_constraint %[[X]] <@mesh, [{"x"}]>
// CHECK-NEXT:    mpmd.return %[[X]]
func.func public @constrained(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %x = stablehlo.negate %p : tensor<4xf32>
    %y = stablehlo.tanh %p : tensor<4xf32>
    %0 = sdy.sharding_constraint %x <@mesh, [{"x"}]> : tensor<4xf32>
    %1 = sdy.sharding_constraint %y <@mesh, [{"x"}]> : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

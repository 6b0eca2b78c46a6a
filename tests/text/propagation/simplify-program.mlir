// RUN: mpmd-opt %s -mpmd-simplify-program | FileCheck %s

sdy.mesh @mesh = <["x"=2, "y"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!s1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>
!y1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"y"}]>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>>

// Equal operands and results are joined, what is passed on is used directly, attributes follow.

// CHECK-LABEL: func.func @joined
// CHECK-NEXT:  %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) {arg_attrs = [{first}], res_attrs = [{r0}]}
// CHECK-NEXT:    stablehlo.add %arg1, %arg1
// CHECK:       mpmd.fragment<mesh="m1", origin=["k"]> (%[[F]], %arg0)
// CHECK-NEXT:    stablehlo.add %arg1, %arg1
// CHECK-NEXT:    stablehlo.multiply {{.*}}, %arg2
func.func @joined(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f:4 = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %a) {arg_attrs = [{first}, {second}], res_attrs = [{r0}, {r1}, {r2}, {r3}]} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    %1 = stablehlo.negate %q : tensor<4xf32>
    mpmd.return %0, %0, %p, %1 : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
  } : (!m1, !m1) -> (!m1, !m1, !m1, !m1)
  %k = mpmd.fragment<mesh="m1", origin=["k"]> (%f#0, %f#1, %f#2) (%p: tensor<4xf32>, %q: tensor<4xf32>, %r: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    %1 = stablehlo.multiply %0, %r : tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (!m1, !m1, !m1) -> !m1
  return %k : !m1
}

// Another sharding makes another value; a pure fragment that nobody reads goes, one with effects stays.

// CHECK-LABEL: func.func @kept
// CHECK:       %{{.*}}:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) (
// CHECK-NEXT:    mpmd.return %arg1, %arg1
// CHECK-NOT:   origin=["gone"]
// CHECK:       mpmd.fragment<mesh="m1", origin=["effect"]>
// CHECK-NEXT:    stablehlo.custom_call @log
func.func @kept(%a: !m1) -> (!m1, !s1) attributes {topology = #topology} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p, %p : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!s1, !y1)
  %g = mpmd.fragment<mesh="m1", origin=["gone"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %h = mpmd.fragment<mesh="m1", origin=["effect"]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.custom_call @log(%p) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %k:2 = mpmd.fragment<mesh="m1", origin=["k"]> (%f#0, %f#1) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %0, %0 : tensor<4xf32>, tensor<4xf32>
  } : (!s1, !y1) -> (!m1, !s1)
  return %k#0, %k#1 : !m1, !s1
}

// Everything is used, once, and computed.

// CHECK-LABEL: func.func @simple_already
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["f"]> (%arg0, %arg1) {arg_attrs = [{first}, {second}]}
func.func @simple_already(%a: !m1, %b: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b) {arg_attrs = [{first}, {second}]} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %f : !m1
}

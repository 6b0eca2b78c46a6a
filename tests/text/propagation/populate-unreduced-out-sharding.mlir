// RUN: mpmd-opt %s -mpmd-populate-unreduced-out-sharding | FileCheck %s

sdy.mesh @mesh = <["x"=2, "y"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>>

// What was found before stays, with the unreduced axis added; the constraint may be a reshard.

// CHECK-LABEL: func.func @added
// CHECK:       out_shardings=[<@mesh, [{"y"}], unreduced={"x"}>, <@mesh, [{"x"}]>]
func.func @added(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"], out_shardings=[<@mesh, [{"y"}]>, <@mesh, [{"x"}]>]> (%a) (%p: tensor<4xf32>) {
    %0 = sdy.reshard %p <@mesh, [{}], unreduced={"x"}> : tensor<4xf32>
    mpmd.return %0, %p : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!m1, !m1)
  return %f#0, %f#1 : !m1, !m1
}

// CHECK-LABEL: func.func @new
// CHECK:       out_shardings=[<@mesh, [{}]>, <@mesh, [{}], unreduced={"x"}>]
func.func @new(%a: !m1) -> (!m1, !m1) attributes {topology = #topology} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = sdy.sharding_constraint %p <@mesh, [{}], unreduced={"x"}> : tensor<4xf32>
    mpmd.return %p, %0 : tensor<4xf32>, tensor<4xf32>
  } : (!m1) -> (!m1, !m1)
  return %f#0, %f#1 : !m1, !m1
}

// CHECK-LABEL: func.func @nothing_to_do
// CHECK-NOT:   out_shardings
func.func @nothing_to_do(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
    %0 = sdy.sharding_constraint %p <@mesh, [{"x"}]> : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

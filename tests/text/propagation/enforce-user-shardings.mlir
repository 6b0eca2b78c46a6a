// RUN: mpmd-opt %s -mpmd-enforce-user-shardings -split-input-file -verify-diagnostics | FileCheck %s

sdy.mesh @mesh = <["x"=2, "y"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>, <"m2" : <["x"=2, "y"=2]>>>

// The argument's sharding goes to its readers, the results' to makers and readers, fragment or transfer.

// CHECK-LABEL: func.func @main
// CHECK:       %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"], in_shardings=[<@mesh, [{"x"}]>], out_shardings=[<@mesh, [{"y"}]>]>
// CHECK:       mpmd.fragment<mesh="m1", origin=["g"], in_shardings=[<@mesh, [{"y"}]>, <@mesh, [{"x"}]>]> (%[[F]], %arg0)
// CHECK:       mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x", "y"}]>]>}
func.func @main(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
    -> (!m1 {sdy.sharding = #sdy.sharding<@mesh, [{"y"}]>}, !m1, !m2 {sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}]>})
    attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], in_shardings=[<@mesh, [{}]>]> (%a) (%p: tensor<4xf32>) {
    %0 = stablehlo.negate %p : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f, %a) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  %t = mpmd.transfer %g : (!m1) -> !m2
  return %f, %g, %t : !m1, !m1, !m2
}

// -----

sdy.mesh @mesh = <["x"=4, "y"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>

// Parts of axes are cut off, in both places; the first of each is reported.

// CHECK-LABEL: func.func @parts_of_axes
// CHECK-SAME:  sdy.sharding = #sdy.sharding<@mesh, [{"y"}]>
// CHECK-SAME:  -> (!mpmd.mesh_tensor<"m1", tensor<8xf32>> {sdy.sharding = #sdy.sharding<@mesh, [{}]>})
// CHECK:       out_shardings=[<@mesh, [{}]>]
func.func @parts_of_axes(
    // expected-warning@+1 {{Sub-axes sharding found for arg 0}}
    %a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"y", "x":(1)2}]>})
    -> (!m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x":(1)2}]>})
    attributes {topology = #mpmd.topology<<"m1" : <["x"=4, "y"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<8xf32>) {
    mpmd.return %p : tensor<8xf32>
  } : (!m1) -> !m1
  // expected-warning@+1 {{Sub-axes sharding found for result 0}}
  return %f : !m1
}

// -----

sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// Without shardings of the user propagation's stay.

// CHECK-LABEL: func.func @nothing_to_do
// CHECK:       in_shardings=[<@mesh, [{"x"}]>]> (%arg0)
func.func @nothing_to_do(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], in_shardings=[<@mesh, [{"x"}]>]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

sdy.mesh @mesh = <["x"=2, "y"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// A fragment that says nothing of what it reads reads arguments as they are.

// CHECK-LABEL: func.func @nothing_said
// CHECK:       mpmd.fragment<mesh="m1", origin=["f"], in_shardings=[<@mesh, [{"x"}]>, <@mesh, [{?}]>]> (%arg0, %arg1)
func.func @nothing_said(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %b: !m1) -> !m1
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b) (%p: tensor<4xf32>, %q: tensor<4xf32>) {
    %0 = stablehlo.add %p, %q : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!m1, !m1) -> !m1
  return %f : !m1
}

// RUN: mpmd-opt %s -mpmd-fit-shardings-to-meshes -split-input-file -verify-diagnostics | FileCheck %s

// An axis keeps its name and has the size of the mesh; a mesh without it does not split; parts of an axis that
// is longer elsewhere are not kept.

!m1 = !mpmd.mesh_tensor<"m1", tensor<8x8xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<8x8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>, <"m2" : <["x"=4]>>>

// CHECK-LABEL: module @unlike
// CHECK-DAG: sdy.mesh @m1 = <["x"=2, "y"=2]>
// CHECK-DAG: sdy.mesh @m2 = <["x"=4]>
// CHECK-NOT: sdy.mesh @mesh
module @unlike {
sdy.mesh @mesh = <["x"=4, "y"=2]>

// CHECK: func.func public @main(%arg0: {{.*}} {sdy.sharding = #sdy.sharding<@m1, [{"x"}, {"y"}]>})
// CHECK-SAME: {sdy.sharding = #sdy.sharding<@m2, [{"x"}, {}]>}
func.func public @main(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) -> (!m2 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) attributes {topology = #topology} {
  // CHECK: in_shardings=[<@m1, [{"x"}, {"y"}]>], out_shardings=[<@m1, [{"x", "y"}, {}]>]
  %f = mpmd.fragment<mesh="m1", origin=["f"], in_shardings=[<@mesh, [{"x"}, {"y"}]>], out_shardings=[<@mesh, [{"x", "y"}, {}]>]> (%a) (%p: tensor<8x8xf32>) {
    // CHECK: sdy.sharding_constraint %{{.*}} <@m1, [{}, {"y"}]>
    %x = sdy.sharding_constraint %p <@mesh, [{"x":(1)2}, {"y"}]> : tensor<8x8xf32>
    mpmd.return %x : tensor<8x8xf32>
  } : (!m1) -> !m1
  // CHECK: mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@m2, [{"x"}, {}]>]>}
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}, {"y"}]>]>} %f : (!m1) -> !m2
  return %t : !m2
}
}

// -----

// Meshes that are alike keep what they have.

!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: module @alike
// CHECK: sdy.mesh @mesh = <["x"=2]>
// CHECK: #sdy.sharding<@mesh, [{"x"}]>
module @alike {
sdy.mesh @mesh = <["x"=2]>
func.func public @main(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> !m1 attributes {topology = #topology} {
  return %a : !m1
}
}

// -----

// What cannot be split evenly is not.

!m1 = !mpmd.mesh_tensor<"m1", tensor<6xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<6xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=4]>>>

// CHECK-LABEL: module @uneven
module @uneven {
sdy.mesh @mesh = <["x"=4]>
// CHECK: sdy.sharding = #sdy.sharding<@m1, [{"x"}]>
// CHECK-SAME: sdy.sharding = #sdy.sharding<@m2, [{}]>
func.func public @main(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %b: !m2 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> !m2 attributes {topology = #topology} {
  return %b : !m2
}
}

// -----

// The names of new meshes are free ones.

!m1 = !mpmd.mesh_tensor<"main", tensor<8xf32>>
#topology = #mpmd.topology<<"main" : <["x"=2]>>, <"m2" : <["x"=4]>>>

// CHECK-LABEL: module @names
// CHECK: sdy.mesh @main_mesh = <["x"=2]>
module @names {
sdy.mesh @mesh = <["x"=4]>
// CHECK: #sdy.sharding<@main_mesh, [{"x"}]>
func.func public @main(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> !m1 attributes {topology = #topology} {
  return %a : !m1
}
}

// -----

// A manual computation was traced for axes of one size.

!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>, <"m2" : <["x"=4, "y"=2]>>>

module @manual {
sdy.mesh @mesh = <["x"=4, "y"=2]>
func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<8xf32>) {
    %fine = sdy.manual_computation(%p) in_shardings=[<@mesh, [{"y"}]>] out_shardings=[<@mesh, [{"y"}]>] manual_axes={"y"} (%q: tensor<4xf32>) {
      sdy.return %q : tensor<4xf32>
    } : (tensor<8xf32>) -> tensor<8xf32>
    // expected-error @+1 {{jax.shard_map runs on mesh 'm1' with x=2, but was traced with x=4}}
    %wrong = sdy.manual_computation(%fine) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%q: tensor<2xf32>) {
      sdy.return %q : tensor<2xf32>
    } : (tensor<8xf32>) -> tensor<8xf32>
    mpmd.return %wrong : tensor<8xf32>
  } : (!m1) -> !m1
  return %f : !m1
}
}

// RUN: mpmd-opt %s -mpmd-extract-reshards-from-inter-mesh-transfers -split-input-file -verify-diagnostics | FileCheck %s

sdy.mesh @mesh = <["x"=2, "y"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>, <"m2" : <["x"=2, "y"=2, "z"=1]>>>

// Sending quarters instead of halves: the maker makes quarters, its other fragment reader takes them, and the
// other transfer, which stands first, gets halves back.

// CHECK-LABEL: func.func @before
// CHECK:       %[[F:.*]] = mpmd.fragment<mesh="m1", origin=["f"], out_shardings=[<@mesh, [{"x", "y"}]>]>
// CHECK:       %[[BACK:.*]] = mpmd.fragment<mesh="m1", origin=[], out_shardings=[<@mesh, [{"x"}]>]> (%[[F]]) {mpmd.inferred_by = ["extract_reshards"]}
// CHECK:       mpmd.transfer {{.*}}[{"x"}]{{.*}} %[[BACK]] :
// CHECK:       mpmd.fragment<mesh="m1", origin=["g"], in_shardings=[<@mesh, [{"x", "y"}]>]> (%[[F]])
// CHECK:       mpmd.transfer {{.*}}[{"x", "y"}]{{.*}} %[[F]] :
func.func @before(%a: !m1) -> (!m2, !m1, !m2) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"], out_shardings=[<@mesh, [{"x"}]>]> (%a) (%p: tensor<8xf32>) {
    %0 = stablehlo.negate %p : tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!m1) -> !m1
  %s = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} %f : (!m1) -> !m2
  %g = mpmd.fragment<mesh="m1", origin=["g"], in_shardings=[<@mesh, [{"x"}]>]> (%f) (%p: tensor<8xf32>) {
    %0 = stablehlo.negate %p : tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!m1) -> !m1
  // expected-warning@+1 {{Found a resharding transfer of a value (tensor<8xf32>) from mesh "m1" to "m2", from #sdy.sharding<@mesh, [{"x"}]> to #sdy.sharding<@mesh, [{"x", "y"}]>, 16 bytes per device}}
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x", "y"}]>]>} %f : (!m1) -> !m2
  return %s, %g, %t : !m2, !m1, !m2
}

// A replicated argument that is to arrive sharded: a fragment in front of the transfer shards it.

// CHECK-LABEL: func.func @argument
// CHECK-NEXT:  %[[R:.*]] = mpmd.fragment<mesh="m1", origin=[], out_shardings=[<@mesh, [{"x"}]>]> (%arg0)
// CHECK:       mpmd.transfer {{.*}} %[[R]]
func.func @argument(%a: !m1) -> !m2 attributes {topology = #topology} {
  // expected-warning@+1 {{from replicated to #sdy.sharding<@mesh, [{"x"}]>, 32 bytes per device}}
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} %a : (!m1) -> !m2
  return %t : !m2
}

// The other way round it is replicated where it arrives: by the fragment that reads it, and for the return by
// one of its own. What reaches the host is resharded before, whatever its size.

// CHECK-LABEL: func.func @after
// CHECK-NEXT:  %[[T:.*]] = mpmd.transfer {{.*}}[{"x"}]{{.*}} %arg0
// CHECK-NEXT:  %[[R:.*]] = mpmd.fragment<mesh="m2", origin=[], out_shardings=[<@mesh, [{}]>]> (%[[T]])
// CHECK:       mpmd.fragment<mesh="m2", origin=["g"], in_shardings=[<@mesh, [{"x"}]>]> (%[[T]])
// CHECK:       %[[H:.*]] = mpmd.fragment<mesh="m1", origin=[], out_shardings=[<@mesh, [{}]>]> (%arg0)
// CHECK:       mpmd.transfer {{.*}}[{}]{{.*}} %[[H]]
func.func @after(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
    -> (!m2, !m2, !mpmd.mesh_tensor<"m1", tensor<8xf32>, memory_kind="pinned_host">) attributes {topology = #topology} {
  // expected-warning@+1 {{Found a resharding transfer}}
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}]>]>} %a : (!m1) -> !m2
  %g = mpmd.fragment<mesh="m2", origin=["g"]> (%t) (%p: tensor<8xf32>) {
    %0 = stablehlo.negate %p : tensor<8xf32>
    mpmd.return %0 : tensor<8xf32>
  } : (!m2) -> !m2
  // expected-warning@+1 {{Found a resharding transfer}}
  %h = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}]>]>} %a : (!m1) -> !mpmd.mesh_tensor<"m1", tensor<8xf32>, memory_kind="pinned_host">
  return %t, %g, %h : !m2, !m2, !mpmd.mesh_tensor<"m1", tensor<8xf32>, memory_kind="pinned_host">
}

// CHECK-LABEL: func.func @nothing_to_do
// CHECK-NOT:   mpmd.fragment
func.func @nothing_to_do(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{}]>}, %b: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"y"}]>}) -> (!m2, !m2) attributes {topology = #topology} {
  %s = mpmd.transfer %a : (!m1) -> !m2
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"y", ?}]>]>} %b : (!m1) -> !m2
  return %s, %t : !m2, !m2
}

// -----

sdy.mesh @mesh = <["x"=2]>
!h1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>, memory_kind="pinned_host">
!h2 = !mpmd.mesh_tensor<"m2", tensor<8xf32>, memory_kind="pinned_host">

// CHECK-LABEL: func.func @between_hosts
func.func @between_hosts(%a: !h1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> !h2 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  // expected-error@+1 {{Resharding on host not supported with an mpmd.transfer}}
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}]>]>} %a : (!h1) -> !h2
  return %t : !h2
}

// -----

sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<8xf32>>

// Meshes of different shapes have no shards in common.

// CHECK-LABEL: func.func @unequal_meshes
// CHECK-NOT:   mpmd.fragment
func.func @unequal_meshes(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> !m2 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=4]>>>} {
  %t = mpmd.transfer %a : (!m1) -> !m2
  return %t : !m2
}

// -----

sdy.mesh @mesh = <["x"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// A fragment without shardings that reads one value in another sharding reads the others as they are.

// CHECK-LABEL: func.func @reads_two
// CHECK:       mpmd.fragment<mesh="m2", origin=["f"], in_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x"}]>, <@mesh, [{?}]>]>
func.func @reads_two(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %b: !m2) -> !m2 attributes {topology = #topology} {
  // expected-warning@+1 {{Found a resharding transfer}}
  %s = mpmd.transfer %a : (!m1) -> !m2
  %t = mpmd.transfer {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} %a : (!m1) -> !m2
  %f = mpmd.fragment<mesh="m2", origin=["f"]> (%s, %t, %b) (%x: tensor<8xf32>, %y: tensor<8xf32>, %z: tensor<8xf32>) {
    %0 = stablehlo.add %x, %y : tensor<8xf32>
    %1 = stablehlo.add %0, %z : tensor<8xf32>
    mpmd.return %1 : tensor<8xf32>
  } : (!m2, !m2, !m2) -> !m2
  return %f : !m2
}

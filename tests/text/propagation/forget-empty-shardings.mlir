// RUN: mpmd-opt %s -mpmd-forget-empty-shardings | FileCheck %s

// What is replicated has no sharding in its type, whether that was said or not.

!said = !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{}]>>
!split = !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"x"}]>>
!plain = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>
sdy.mesh @mesh = <["x"=2]>

// CHECK: func.func public @main(%{{.*}}: !mpmd.mesh_tensor<"m1", tensor<8xf32>>, %{{.*}}: !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"x"}]>>) -> (!mpmd.mesh_tensor<"m1", tensor<8xf32>>, !mpmd.mesh_tensor<"m1", tensor<8xf32>>)
// CHECK: mpmd.fragment
// CHECK: } : (!mpmd.mesh_tensor<"m1", tensor<8xf32>>, !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"x"}]>>) -> (!mpmd.mesh_tensor<"m1", tensor<8xf32>>, !mpmd.mesh_tensor<"m1", tensor<8xf32>>)
func.func public @main(%a: !said, %b: !split) -> (!said, !plain) attributes {topology = #topology} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b) (%p: tensor<8xf32>, %q: tensor<8xf32>) {
    mpmd.return %p, %q : tensor<8xf32>, tensor<8xf32>
  } : (!said, !split) -> (!said, !plain)
  return %f#0, %f#1 : !said, !plain
}

// CHECK: func.func public @nothing_empty(%{{.*}}: !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"x"}]>>) -> !mpmd.mesh_tensor<"m1", tensor<8xf32>>
func.func public @nothing_empty(%a: !split) -> !plain attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<8xf32>) {
    mpmd.return %p : tensor<8xf32>
  } : (!split) -> !plain
  return %f : !plain
}

// RUN: mpmd-opt %s -mpmd-generate-sdy-meshes-from-topology -split-input-file | FileCheck %s

// CHECK-LABEL: module @shardings
// CHECK-DAG: sdy.mesh @a = <["a_x"=2]>
// CHECK-DAG: sdy.mesh @b = <["b_x"=2, "b_y"=2]>
// CHECK-DAG: sdy.mesh @empty_mesh = <[]>
// CHECK-NOT: @all
module @shardings {
  sdy.mesh @all = <["a_x"=2, "b_x"=2, "b_y"=2]>

  // CHECK: func.func @main(%arg0: tensor<8xf32> {sdy.sharding = #sdy.sharding<@b, [{"b_x", "b_y"}]>},
  // CHECK-SAME: %arg1: tensor<8xf32> {sdy.sharding = #sdy.sharding<@empty_mesh, [{}]>}
  // CHECK-SAME: topology = #mpmd.topology<<"a" : <["a_x"=2]>>, <"b" : <["b_x"=2, "b_y"=2]>>, <"empty_mesh" : <[]>>>
  func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@all, [{"b_x", "b_y"}]>},
                  %y: tensor<8xf32> {sdy.sharding = #sdy.sharding<@all, [{}]>}) -> tensor<8xf32>
      attributes {topology = #mpmd.topology<<"a" : <["a_x"=2]>>, <"b" : <["b_x"=2, "b_y"=2]>>>} {
    // CHECK: sdy.sharding_constraint %arg1 <@a, [{"a_x"}]>
    %0 = sdy.sharding_constraint %y <@all, [{"a_x"}]> : tensor<8xf32>
    return %0 : tensor<8xf32>
  }
}

// -----

// No topology, no meshes.
// CHECK-LABEL: module @plain
// CHECK-NEXT: sdy.mesh @mesh = <["x"=2]>
module @plain {
  sdy.mesh @mesh = <["x"=2]>
  func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
    return %x : tensor<8xf32>
  }
}

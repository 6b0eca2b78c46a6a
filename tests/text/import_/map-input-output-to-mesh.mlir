// RUN: mpmd-opt %s -mpmd-map-input-output-to-mesh='input-assignment=1@m2#pinned_host,0@m1 output-assignment=1@m2' | FileCheck %s

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// CHECK-LABEL: func @main
// CHECK-SAME: %arg0: !mpmd.mesh_tensor<"m1", tensor<4xf32>> {mhlo.memory_kind = "device"}
// CHECK-SAME: %arg1: !mpmd.mesh_tensor<"m2", tensor<4xf32>, memory_kind="pinned_host">,
// CHECK-SAME: -> (tensor<4xf32>, !mpmd.mesh_tensor<"m2", tensor<4xf32>>)
func.func @main(%a: tensor<4xf32> {mhlo.memory_kind = "device"},
                %b: tensor<4xf32> {mhlo.memory_kind = "pinned_host"}, %c: tensor<4xf32>)
    -> (tensor<4xf32>, tensor<4xf32>) attributes {topology = #topology} {
  // CHECK-NEXT: %[[A:.*]] = mpmd.unassign {origin = "user_in"} %arg0
  // CHECK-NEXT: %[[B:.*]] = mpmd.unassign {origin = "user_in"} %arg1
  // CHECK-NEXT: %[[SUM:.*]] = stablehlo.add %[[A]], %[[B]]
  // CHECK-NEXT: %[[OUT:.*]] = mpmd.assign {origin = "user_out"} %arg2
  // CHECK-NEXT: return %[[SUM]], %[[OUT]]
  %0 = stablehlo.add %a, %b : tensor<4xf32>
  return %0, %c : tensor<4xf32>, tensor<4xf32>
}

// Only entry functions are mapped.
// CHECK-LABEL: func private @callee(%arg0: tensor<4xf32>, %arg1: tensor<4xf32>)
func.func private @callee(%a: tensor<4xf32>, %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #topology} {
  return %a, %b : tensor<4xf32>, tensor<4xf32>
}

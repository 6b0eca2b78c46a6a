// RUN: mpmd-opt %s -mpmd-uniquify-function-inputs-outputs=use-transfer-instead-of-fragment=true -split-input-file \
// RUN:   | FileCheck %s

// Arguments always, other values from the second time on, are copied by identity transfers.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2_pinned_host = !mpmd.mesh_tensor<"m2", tensor<4xf32>, memory_kind="pinned_host">
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V0:.*]] = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.add %[[ARG2]], %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V5]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[ARG0]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[ARG1]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V3:.*]] = mpmd.transfer %[[V0]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V4:.*]] = mpmd.transfer %[[ARG0]] : {{.*}} -> !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: return %[[V0]], %[[V1]], %[[V2]], %[[V3]], %[[V4]]
func.func public @main(%a: !m1, %b: !m2_pinned_host) -> (!m1, !m1, !m2_pinned_host, !m1, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<4xf32>) {
    %x = stablehlo.add %a_, %a_ : tensor<4xf32>
    mpmd.return %x : tensor<4xf32>
  } : (!m1) -> !m1
  return %f, %a, %b, %f, %a : !m1, !m1, !m2_pinned_host, !m1, !m1
}

// RUN: mpmd-opt %s -mpmd-split-accumulators-by-mesh -split-input-file | FileCheck %s

// A sum carried from call to call whose terms arise on two meshes gets an accumulator on each.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

// CHECK-LABEL: func.func public @main
// CHECK-SAME:    (%[[ACC:[^:]*]]: tensor<4xf32>, %[[X:[^:]*]]: !mpmd
// CHECK:         %[[ZERO:.*]] = stablehlo.constant dense<0.000000e+00> : tensor<4xf32>
// CHECK-NEXT:    %[[A:.*]]:2 = mpmd.call @body(%[[ACC]], %[[X]], %[[Y:.*]], %[[ZERO]]) {call_counter = 0 : ui32}
// CHECK-NEXT:    %[[B:.*]]:2 = mpmd.call @body(%[[A]]#0, %[[X]], %[[Y]], %[[A]]#1) {call_counter = 1 : ui32}
// CHECK-NEXT:    %[[SUM:.*]] = stablehlo.add %[[B]]#0, %[[B]]#1
// CHECK-NEXT:    return %[[SUM]]
func.func public @main(%acc: tensor<4xf32>, %x: !m1, %y: !m2) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>, <"m2" : <["x"=1]>>>} {
  %0 = mpmd.call @body(%acc, %x, %y) {call_counter = 0 : ui32} : (tensor<4xf32>, !m1, !m2) -> tensor<4xf32>
  %1 = mpmd.call @body(%0, %x, %y) {call_counter = 1 : ui32} : (tensor<4xf32>, !m1, !m2) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

// CHECK-LABEL: func.func private @body
// CHECK-SAME:    (%[[ACC:[^:]*]]: tensor<4xf32>, %{{.*}}: !mpmd.{{.*}}, %{{.*}}: !mpmd.{{.*}}, %[[MORE:[^:]*]]: tensor<4xf32>)
// CHECK:         %[[G1:.*]] = mpmd.unassign
// CHECK:         %[[G2:.*]] = mpmd.unassign
// CHECK:         %[[S1:.*]] = stablehlo.add %[[ACC]], %[[G1]]
// CHECK:         %[[S2:.*]] = stablehlo.add %[[MORE]], %[[G2]]
// CHECK:         return %[[S1]], %[[S2]]
func.func private @body(%acc: tensor<4xf32>, %x: !m1, %y: !m2) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>, <"m2" : <["x"=1]>>>} {
  %g1 = mpmd.unassign %x : (!m1) -> tensor<4xf32>
  %g2 = mpmd.unassign %y : (!m2) -> tensor<4xf32>
  %g = stablehlo.add %g1, %g2 : tensor<4xf32>
  %sum = stablehlo.add %acc, %g : tensor<4xf32>
  return %sum : tensor<4xf32>
}

// -----

// All terms arise on one mesh: nothing to split.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK-LABEL: func.func public @one_mesh
// CHECK-NEXT:    mpmd.call @one(%{{.*}}, %{{.*}}) {call_counter = 0 : ui32}
// CHECK-NEXT:    mpmd.call @one(%{{.*}}, %{{.*}}) {call_counter = 1 : ui32}
// CHECK-NEXT:    return
func.func public @one_mesh(%acc: tensor<4xf32>, %x: !m1) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %0 = mpmd.call @one(%acc, %x) {call_counter = 0 : ui32} : (tensor<4xf32>, !m1) -> tensor<4xf32>
  %1 = mpmd.call @one(%0, %x) {call_counter = 1 : ui32} : (tensor<4xf32>, !m1) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}
func.func private @one(%acc: tensor<4xf32>, %x: !m1) -> tensor<4xf32>
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>>} {
  %g1 = mpmd.unassign %x : (!m1) -> tensor<4xf32>
  %g = stablehlo.add %g1, %g1 : tensor<4xf32>
  %sum = stablehlo.add %acc, %g : tensor<4xf32>
  return %sum : tensor<4xf32>
}

// -----

// Two accumulators change places: each takes the whole of the other, and its own parts begin anew.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
!m3 = !mpmd.mesh_tensor<"m3", tensor<4xf32>>

// CHECK-LABEL: func.func public @crossed
// CHECK:         %[[A:.*]]:5 = mpmd.call @both({{.*}}) {call_counter = 0 : ui32}
// CHECK:         %[[B:.*]]:5 = mpmd.call @both(%[[A]]#0, %[[A]]#1, %arg2, %arg3, %arg4, %[[A]]#2, %[[A]]#3, %[[A]]#4) {call_counter = 1 : ui32}
// CHECK-DAG:     %[[V:.*]] = stablehlo.add %[[B]]#1, %[[B]]#4
// CHECK-DAG:     %[[U1:.*]] = stablehlo.add %[[B]]#0, %[[B]]#2
// CHECK-DAG:     %[[U:.*]] = stablehlo.add %[[U1]], %[[B]]#3
// CHECK-DAG:     %[[Z0:.*]] = stablehlo.constant
// CHECK-DAG:     %[[Z1:.*]] = stablehlo.constant
// CHECK-DAG:     %[[Z2:.*]] = stablehlo.constant
// CHECK:         mpmd.call @both(%[[V]], %[[U]], %arg2, %arg3, %arg4, %[[Z0]], %[[Z1]], %[[Z2]]) {call_counter = 2 : ui32}
func.func public @crossed(%u: tensor<4xf32>, %v: tensor<4xf32>, %x: !m1, %y: !m2, %z: !m3) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>, <"m2" : <["x"=1]>>, <"m3" : <["x"=1]>>>} {
  %0:2 = mpmd.call @both(%u, %v, %x, %y, %z) {call_counter = 0 : ui32} : (tensor<4xf32>, tensor<4xf32>, !m1, !m2, !m3) -> (tensor<4xf32>, tensor<4xf32>)
  %1:2 = mpmd.call @both(%0#0, %0#1, %x, %y, %z) {call_counter = 1 : ui32} : (tensor<4xf32>, tensor<4xf32>, !m1, !m2, !m3) -> (tensor<4xf32>, tensor<4xf32>)
  %2:2 = mpmd.call @both(%1#1, %1#0, %x, %y, %z) {call_counter = 2 : ui32} : (tensor<4xf32>, tensor<4xf32>, !m1, !m2, !m3) -> (tensor<4xf32>, tensor<4xf32>)
  return %2#0, %2#1 : tensor<4xf32>, tensor<4xf32>
}
func.func private @both(%u: tensor<4xf32>, %v: tensor<4xf32>, %x: !m1, %y: !m2, %z: !m3) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>, <"m2" : <["x"=1]>>, <"m3" : <["x"=1]>>>} {
  %g1 = mpmd.unassign %x : (!m1) -> tensor<4xf32>
  %g2 = mpmd.unassign %y : (!m2) -> tensor<4xf32>
  %g3 = mpmd.unassign %z : (!m3) -> tensor<4xf32>
  %h1 = stablehlo.tanh %g1 : tensor<4xf32>
  %h2 = stablehlo.tanh %g2 : tensor<4xf32>
  %a = stablehlo.add %g1, %g2 : tensor<4xf32>
  %b = stablehlo.add %a, %g3 : tensor<4xf32>
  %c = stablehlo.add %u, %b : tensor<4xf32>
  %d = stablehlo.add %h1, %h2 : tensor<4xf32>
  %e = stablehlo.add %v, %d : tensor<4xf32>
  return %c, %e : tensor<4xf32>, tensor<4xf32>
}

// -----

// A total that the microbatch reads, too, must be whole there.

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

// CHECK-LABEL: func.func public @read
// CHECK-NEXT:    %[[A:.*]]:2 = mpmd.call @reads(%arg0, %arg1, %arg2) {call_counter = 0 : ui32}
// CHECK-NEXT:    %[[B:.*]]:2 = mpmd.call @reads(%[[A]]#0, %arg1, %arg2) {call_counter = 1 : ui32}
// CHECK-NEXT:    return %[[B]]#0, %[[B]]#1
func.func public @read(%acc: tensor<4xf32>, %x: !m1, %y: !m2) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>, <"m2" : <["x"=1]>>>} {
  %0:2 = mpmd.call @reads(%acc, %x, %y) {call_counter = 0 : ui32} : (tensor<4xf32>, !m1, !m2) -> (tensor<4xf32>, tensor<4xf32>)
  %1:2 = mpmd.call @reads(%0#0, %x, %y) {call_counter = 1 : ui32} : (tensor<4xf32>, !m1, !m2) -> (tensor<4xf32>, tensor<4xf32>)
  return %1#0, %1#1 : tensor<4xf32>, tensor<4xf32>
}
func.func private @reads(%acc: tensor<4xf32>, %x: !m1, %y: !m2) -> (tensor<4xf32>, tensor<4xf32>)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=1]>>, <"m2" : <["x"=1]>>>} {
  %g1 = mpmd.unassign %x : (!m1) -> tensor<4xf32>
  %g2 = mpmd.unassign %y : (!m2) -> tensor<4xf32>
  %g = stablehlo.add %g1, %g2 : tensor<4xf32>
  %sum = stablehlo.add %acc, %g : tensor<4xf32>
  %half = stablehlo.tanh %acc : tensor<4xf32>
  return %sum, %half : tensor<4xf32>, tensor<4xf32>
}

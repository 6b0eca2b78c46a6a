// RUN: mpmd-opt %s -mpmd-merge-transfers -split-input-file | FileCheck %s

// Two scalars for one consumer travel as one value; another type and a large value do not join them.

!m1_f32 = !mpmd.mesh_tensor<"m1", tensor<f32>>
!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m1_1xf32 = !mpmd.mesh_tensor<"m1", tensor<1xf32>>
!m2_f32 = !mpmd.mesh_tensor<"m2", tensor<f32>>
!m2_1xf32 = !mpmd.mesh_tensor<"m2", tensor<1xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG2:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:5 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]], %[[ARG1]], %[[ARG2]]) (%[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]{{.*}}, %[[ARG5:[^:]*]]
// CHECK-NEXT:   %[[V7:.*]] = stablehlo.negate %[[ARG3]]
// CHECK-NEXT:   %[[V8:.*]] = stablehlo.tanh %[[ARG4]]
// CHECK-NEXT:   %[[V9:.*]] = stablehlo.abs %[[ARG5]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.reshape %[[V7]]
// CHECK-NEXT:   %[[V11:.*]] = stablehlo.reshape %[[ARG3]]
// CHECK-NEXT:   %[[V12:.*]] = stablehlo.concatenate %[[V10]], %[[V11]], dim = 0
// CHECK-NEXT:   mpmd.return %[[V7]], %[[ARG3]], %[[V8]], %[[V9]], %[[V12]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer {concat_transfer} %[[V0]]#4 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[V0]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V3:.*]] = mpmd.transfer %[[V0]]#1 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V4:.*]] = mpmd.transfer %[[V0]]#2 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V5:.*]] = mpmd.transfer %[[V0]]#3 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V6:.*]]:2 = mpmd.fragment<mesh="m2", origin=["g"]> (%[[V3]], %[[V4]], %[[V2]], %[[V5]], %[[V1]]) (%[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]{{.*}}, %[[ARG5:[^:]*]]{{.*}}, %[[ARG6:[^:]*]]{{.*}}, %[[ARG7:[^:]*]]
// CHECK-NEXT:   %[[V7:.*]] = stablehlo.slice %[[ARG7]] [1:2]
// CHECK-NEXT:   %[[V8:.*]] = stablehlo.reshape %[[V7]]
// CHECK-NEXT:   %[[V9:.*]] = stablehlo.slice %[[ARG7]] [0:1]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.reshape %[[V9]]
// CHECK-NEXT:   %[[V11:.*]] = stablehlo.multiply %[[V8]], %[[V10]]
// CHECK-NEXT:   %[[V12:.*]] = stablehlo.add %[[ARG4]], %[[ARG4]]
// CHECK-NEXT:   mpmd.return %[[V11]], %[[ARG6]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V6]]#0, %[[V6]]#1
func.func public @main(%a: !m1_f32, %b: !m1, %c: !m1_1xf32) -> (!m2_f32, !m2_1xf32) attributes {topology = #topology} {
  %f, %g, %h, %k = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b, %c) (%a_: tensor<f32>, %b_: tensor<4xf32>, %c_: tensor<1xf32>) {
    %x = stablehlo.negate %a_ : tensor<f32>
    %y = stablehlo.tanh %b_ : tensor<4xf32>
    %z = stablehlo.abs %c_ : tensor<1xf32>
    mpmd.return %x, %a_, %y, %z : tensor<f32>, tensor<f32>, tensor<4xf32>, tensor<1xf32>
  } : (!m1_f32, !m1, !m1_1xf32) -> (!m1_f32, !m1_f32, !m1, !m1_1xf32)
  %s = mpmd.transfer %f : (!m1_f32) -> !m2_f32
  %t = mpmd.transfer %g : (!m1_f32) -> !m2_f32
  %u = mpmd.transfer %h : (!m1) -> !m2
  %v = mpmd.transfer %k : (!m1_1xf32) -> !m2_1xf32
  %w, %z = mpmd.fragment<mesh="m2", origin=["g"]> (%t, %u, %s, %v) (%t_: tensor<f32>, %u_: tensor<4xf32>, %s_: tensor<f32>, %v_: tensor<1xf32>) {
    %p = stablehlo.multiply %t_, %s_ : tensor<f32>
    %q = stablehlo.add %u_, %u_ : tensor<4xf32>
    mpmd.return %p, %v_ : tensor<f32>, tensor<1xf32>
  } : (!m2_f32, !m2, !m2_f32, !m2_1xf32) -> (!m2_f32, !m2_1xf32)
  return %w, %z : !m2_f32, !m2_1xf32
}

// -----

// Groups by consumer; each consumer cuts its arguments out of what it is sent.

!m1_f32 = !mpmd.mesh_tensor<"m1", tensor<f32>>
!m2_f32 = !mpmd.mesh_tensor<"m2", tensor<f32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:4 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG1:[^:]*]]
// CHECK-NEXT:   %[[V7:.*]] = stablehlo.negate %[[ARG1]]
// CHECK-NEXT:   %[[V8:.*]] = stablehlo.reshape %[[V7]]
// CHECK-NEXT:   %[[V9:.*]] = stablehlo.reshape %[[ARG1]]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.concatenate %[[V8]], %[[V9]], dim = 0
// CHECK-NEXT:   %[[V11:.*]] = stablehlo.reshape %[[V7]]
// CHECK-NEXT:   %[[V12:.*]] = stablehlo.reshape %[[ARG1]]
// CHECK-NEXT:   %[[V13:.*]] = stablehlo.concatenate %[[V11]], %[[V12]], dim = 0
// CHECK-NEXT:   mpmd.return %[[V7]], %[[ARG1]], %[[V10]], %[[V13]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer {concat_transfer} %[[V0]]#3 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer {concat_transfer} %[[V0]]#2 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V3:.*]] = mpmd.transfer %[[V0]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V4:.*]] = mpmd.transfer %[[V0]]#1 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V5:.*]] = mpmd.fragment<mesh="m2", origin=["g"]> (%[[V3]], %[[V4]], %[[V1]]) (%[[ARG1:[^:]*]]{{.*}}, %[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V7:.*]] = stablehlo.slice %[[ARG3]] [0:1]
// CHECK-NEXT:   %[[V8:.*]] = stablehlo.reshape %[[V7]]
// CHECK-NEXT:   %[[V9:.*]] = stablehlo.slice %[[ARG3]] [1:2]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.reshape %[[V9]]
// CHECK-NEXT:   %[[V11:.*]] = stablehlo.multiply %[[V8]], %[[V10]]
// CHECK-NEXT:   mpmd.return %[[V11]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V6:.*]] = mpmd.fragment<mesh="m2", origin=["h"]> (%[[V4]], %[[V3]], %[[V2]]) (%[[ARG1:[^:]*]]{{.*}}, %[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]
// CHECK-NEXT:   %[[V7:.*]] = stablehlo.slice %[[ARG3]] [1:2]
// CHECK-NEXT:   %[[V8:.*]] = stablehlo.reshape %[[V7]]
// CHECK-NEXT:   %[[V9:.*]] = stablehlo.slice %[[ARG3]] [0:1]
// CHECK-NEXT:   %[[V10:.*]] = stablehlo.reshape %[[V9]]
// CHECK-NEXT:   %[[V11:.*]] = stablehlo.subtract %[[V8]], %[[V10]]
// CHECK-NEXT:   mpmd.return %[[V11]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V5]], %[[V6]]
func.func public @main(%a: !m1_f32) -> (!m2_f32, !m2_f32) attributes {topology = #topology} {
  %f, %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<f32>) {
    %x = stablehlo.negate %a_ : tensor<f32>
    mpmd.return %x, %a_ : tensor<f32>, tensor<f32>
  } : (!m1_f32) -> (!m1_f32, !m1_f32)
  %s = mpmd.transfer %f : (!m1_f32) -> !m2_f32
  %t = mpmd.transfer %g : (!m1_f32) -> !m2_f32
  %h = mpmd.fragment<mesh="m2", origin=["g"]> (%s, %t) (%s_: tensor<f32>, %t_: tensor<f32>) {
    %p = stablehlo.multiply %s_, %t_ : tensor<f32>
    mpmd.return %p : tensor<f32>
  } : (!m2_f32, !m2_f32) -> !m2_f32
  %k = mpmd.fragment<mesh="m2", origin=["h"]> (%t, %s) (%t_: tensor<f32>, %s_: tensor<f32>) {
    %p = stablehlo.subtract %t_, %s_ : tensor<f32>
    mpmd.return %p : tensor<f32>
  } : (!m2_f32, !m2_f32) -> !m2_f32
  return %h, %k : !m2_f32, !m2_f32
}

// -----

// One value per consumer, values from arguments, and values in another memory are sent alone.

!m1_f32 = !mpmd.mesh_tensor<"m1", tensor<f32>>
!m2_f32 = !mpmd.mesh_tensor<"m2", tensor<f32>>
!m2_f32_pinned_host = !mpmd.mesh_tensor<"m2", tensor<f32>, memory_kind="pinned_host">
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m3" : <["x"=2]>>>

// CHECK-LABEL: func.func public @main(
// CHECK-SAME:  %[[ARG0:[^:]*]]: !mpmd.mesh_tensor<"m1"{{.*}}, %[[ARG1:[^:]*]]: !mpmd.mesh_tensor<"m1"
// CHECK-NEXT: %[[V0:.*]]:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%[[ARG0]]) (%[[ARG2:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.negate %[[ARG2]]
// CHECK-NEXT:   mpmd.return %[[V5]], %[[ARG2]]
// CHECK-NEXT: }
// CHECK-NEXT: %[[V1:.*]] = mpmd.transfer %[[V0]]#0 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V2:.*]] = mpmd.transfer %[[ARG1]] : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V3:.*]] = mpmd.transfer %[[V0]]#1 : {{.*}} -> !mpmd.mesh_tensor<"m2"
// CHECK-NEXT: %[[V4:.*]] = mpmd.fragment<mesh="m2", origin=["g"]> (%[[V1]], %[[V2]], %[[V3]]) (%[[ARG2:[^:]*]]{{.*}}, %[[ARG3:[^:]*]]{{.*}}, %[[ARG4:[^:]*]]
// CHECK-NEXT:   %[[V5:.*]] = stablehlo.multiply %[[ARG2]], %[[ARG3]]
// CHECK-NEXT:   %[[V6:.*]] = stablehlo.multiply %[[V5]], %[[ARG4]]
// CHECK-NEXT:   mpmd.return %[[V6]]
// CHECK-NEXT: }
// CHECK-NEXT: return %[[V4]]
func.func public @main(%a: !m1_f32, %b: !m1_f32) -> !m2_f32 attributes {topology = #topology} {
  %f, %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%a_: tensor<f32>) {
    %x = stablehlo.negate %a_ : tensor<f32>
    mpmd.return %x, %a_ : tensor<f32>, tensor<f32>
  } : (!m1_f32) -> (!m1_f32, !m1_f32)
  %s = mpmd.transfer %f : (!m1_f32) -> !m2_f32
  %t = mpmd.transfer %b : (!m1_f32) -> !m2_f32
  %u = mpmd.transfer %g : (!m1_f32) -> !m2_f32_pinned_host
  %h = mpmd.fragment<mesh="m2", origin=["g"]> (%s, %t, %u) (%s_: tensor<f32>, %t_: tensor<f32>, %u_: tensor<f32>) {
    %p = stablehlo.multiply %s_, %t_ : tensor<f32>
    %q = stablehlo.multiply %p, %u_ : tensor<f32>
    mpmd.return %q : tensor<f32>
  } : (!m2_f32, !m2_f32, !m2_f32_pinned_host) -> !m2_f32
  return %h : !m2_f32
}

// -----

// Values in host memory are not joined: the joined one would be on the device.

!m1 = !mpmd.mesh_tensor<"m1", tensor<f32>>
!h1 = !mpmd.mesh_tensor<"m1", tensor<f32>, memory_kind="pinned_host">
!m2 = !mpmd.mesh_tensor<"m2", tensor<f32>>

// CHECK-LABEL: func.func public @host
// CHECK-NOT:   concat_transfer
func.func public @host(%a: !m1) -> !m2 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  %f, %g = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<f32>) {
    %x = stablehlo.negate %p : tensor<f32>
    mpmd.return %x, %p : tensor<f32>, tensor<f32>
  } : (!m1) -> (!h1, !h1)
  %s = mpmd.transfer %f : (!h1) -> !m2
  %t = mpmd.transfer %g : (!h1) -> !m2
  %h = mpmd.fragment<mesh="m2", origin=["g"]> (%s, %t) (%p: tensor<f32>, %q: tensor<f32>) {
    %x = stablehlo.multiply %p, %q : tensor<f32>
    mpmd.return %x : tensor<f32>
  } : (!m2, !m2) -> !m2
  return %h : !m2
}

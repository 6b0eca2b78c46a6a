// RUN: mpmd-opt %s -mpmd-sharding-propagation-pipeline -split-input-file -mlir-diagnostic-verbosity-level=errors | FileCheck %s
// RUN: mpmd-opt %s -mpmd-sharding-propagation-pipeline='jax-shardings=true' -split-input-file | FileCheck %s --check-prefix=JAX

// Shardings keep the mesh that they name, whatever size it has in the topology; arrays of JAX need the real one.

!m1 = !mpmd.mesh_tensor<"m1", tensor<8x8xf32>>
sdy.mesh @mesh = <["x"=4]>

// CHECK: sdy.mesh @mesh
// CHECK: func.func public @sizes(%arg0: {{.*}}sharding=<@mesh, [{"x"}, {}]>>) -> {{.*}}sharding=<@mesh, [{"x"}, {}]>>
// JAX:   sdy.mesh @m1 = <["x"=2]>
// JAX:   func.func public @sizes(%arg0: {{.*}}sharding=<@m1, [{"x"}, {}]>>) -> {{.*}}sharding=<@m1, [{"x"}, {}]>>
func.func public @sizes(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<8x8xf32>) {
    %0 = stablehlo.negate %p : tensor<8x8xf32>
    mpmd.return %0 : tensor<8x8xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

// -----

// A dim that an axis does not divide is sharded over a part of the axis; arrays of JAX are not.

!m1 = !mpmd.mesh_tensor<"m1", tensor<2x8xf32>>
sdy.mesh @mesh = <["x"=8]>

// CHECK-LABEL: func.func public @parts
// CHECK:       } : ({{.*}}sharding=<@mesh, [{}, {}]>>) -> {{.*}}sharding=<@mesh, [{"x":(1)2}, {}]>>
// CHECK-NEXT:  mpmd.fragment<mesh="m1", origin=["g"]> {{.*}} {
// CHECK:       } : ({{.*}}sharding=<@mesh, [{"x":(1)2}, {}]>>) ->
// JAX-LABEL:   func.func public @parts
// JAX-NOT:     (1)2
// JAX:         return
func.func public @parts(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=8]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<2x8xf32>) {
    %0 = stablehlo.negate %p : tensor<2x8xf32>
    mpmd.return %0 : tensor<2x8xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f) (%p: tensor<2x8xf32>) {
    %0 = stablehlo.abs %p : tensor<2x8xf32>
    mpmd.return %0 : tensor<2x8xf32>
  } : (!m1) -> !m1
  return %g : !m1
}

// -----

// What guides the propagation inside of a fragment when it is compiled stays, and what folds has folded.

!m1 = !mpmd.mesh_tensor<"m1", tensor<8x8xf32>>
sdy.mesh @mesh = <["x"=2]>

// CHECK-LABEL: func.func public @groups
// CHECK:         mpmd.fragment<mesh="m1", origin=["f"]> (%arg0) (%arg1: tensor<8x8xf32>) {
// CHECK-NEXT:      sdy.sharding_group %arg1 group_id=0
// CHECK-NEXT:      %[[B:.*]] = sdy.propagation_barrier %arg1 allowed_direction=NONE
// CHECK-NEXT:      %[[C:.*]] = sdy.sharding_constraint %[[B]] <@mesh, [{}, {"x"}]>
// CHECK-NEXT:      %[[N:.*]] = stablehlo.negate %[[C]]
// CHECK-NEXT:      mpmd.return %[[N]]
func.func public @groups(%a: !m1 {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<8x8xf32>) {
    sdy.sharding_group %p group_id=0 : tensor<8x8xf32>
    %0 = sdy.propagation_barrier %p allowed_direction=NONE : tensor<8x8xf32>
    %1 = sdy.sharding_constraint %0 <@mesh, [{}, {"x"}]> : tensor<8x8xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<8x8xf32>
    %no = stablehlo.constant dense<false> : tensor<i1>
    %2 = stablehlo.select %no, %p, %zero : tensor<i1>, tensor<8x8xf32>
    %3 = stablehlo.add %1, %2 : tensor<8x8xf32>
    %4 = stablehlo.negate %3 : tensor<8x8xf32>
    mpmd.return %4 : tensor<8x8xf32>
  } : (!m1) -> !m1
  return %f : !m1
}

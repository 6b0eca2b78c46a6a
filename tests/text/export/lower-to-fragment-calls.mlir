// RUN: mpmd-opt %s -mpmd-lower-to-fragment-calls -split-input-file -verify-diagnostics | FileCheck %s
// RUN: mpmd-opt %s -mpmd-lower-to-fragment-calls='verbose-logging=true' -split-input-file -verify-diagnostics 2>&1 | FileCheck %s --check-prefix=LOG

// Three fragments, two programs: equal bodies, but the third makes another sharding. Calls keep what the
// runtime wants to know; the larger reservation counts; attributes go to arguments and results.

// LOG: Module jit_step on mesh m1 will execute
// LOG: - p0_block_0:1_fwd_calls0to1.step from program with origins [block_0(fwd), block_1(fwd)], call counter 0

module @jit_step {
  sdy.mesh @mesh = <["x"=2]>

  // CHECK-LABEL: func.func public @main
  // CHECK-NEXT:  %[[A:.*]] = mpmd.fragment_call<mesh="m1", origin=["block_0", "block_1"]> @"p0_block_0:1_fwd_calls0to1.step"(%arg0) {call_counter = 0 : ui32} :
  // CHECK-NEXT:  %[[B:.*]] = mpmd.fragment_call<mesh="m1", origin=["block_0", "block_1"]> @"p0_block_0:1_fwd_calls0to1.step"(%[[A]]) {call_counter = 1 : ui32} :
  // CHECK-NEXT:  mpmd.fragment_call<mesh="m1", origin=["block_1"(1)]> @p1_stage1_bwd.step(%[[B]]) {remat, split_keep_transferred, stage_id = 1 : i64} :
  // CHECK-NOT:   mpmd.fragment<
  // CHECK:       func.func @"p0_block_0:1_fwd_calls0to1.step"(%arg0: tensor<4xf32> {tf.aliasing_output = 0 : i32}) -> (tensor<4xf32> {mhlo.layout_mode = "auto"}) attributes {mesh_shape = #sdy.mesh<["x"=2]>, reserved_hbm_bytes = 48 : i64} {
  // CHECK-NEXT:    stablehlo.negate %arg0
  // CHECK-NEXT:    return
  // CHECK:       func.func @p1_stage1_bwd.step(%arg0: tensor<4xf32>{{.*}}) -> (tensor<4xf32> {mhlo.layout_mode = "auto", sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
  func.func public @main(%a: !mpmd.mesh_tensor<"m1", tensor<4xf32>>) -> !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>> attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
    %0 = mpmd.fragment<mesh="m1", origin=["block_0", "block_1"]> (%a) {arg_attrs = [{tf.aliasing_output = 0 : i32}], call_counter = 0 : ui32, res_attrs = [{mhlo.layout_mode = "auto"}], reserved_hbm_bytes = 16 : i64} (%p: tensor<4xf32>) {
      %3 = stablehlo.negate %p : tensor<4xf32>
      mpmd.return %3 : tensor<4xf32>
    } : (!mpmd.mesh_tensor<"m1", tensor<4xf32>>) -> !mpmd.mesh_tensor<"m1", tensor<4xf32>>
    %1 = mpmd.fragment<mesh="m1", origin=["block_0", "block_1"]> (%0) {arg_attrs = [{tf.aliasing_output = 0 : i32}], call_counter = 1 : ui32, res_attrs = [{mhlo.layout_mode = "auto"}], reserved_hbm_bytes = 48 : i64} (%p: tensor<4xf32>) {
      %3 = stablehlo.negate %p : tensor<4xf32>
      mpmd.return %3 : tensor<4xf32>
    } : (!mpmd.mesh_tensor<"m1", tensor<4xf32>>) -> !mpmd.mesh_tensor<"m1", tensor<4xf32>>
    %2 = mpmd.fragment<mesh="m1", origin=["block_1"(1)], stage=1> (%1) {arg_attrs = [{tf.aliasing_output = 0 : i32}], mpmd.inferred_by = [], res_attrs = [{mhlo.layout_mode = "auto"}], reserved_hbm_bytes = 0 : i64, remat, split_keep_transferred} (%p: tensor<4xf32>) {
      %3 = stablehlo.negate %p : tensor<4xf32>
      mpmd.return %3 : tensor<4xf32>
    } : (!mpmd.mesh_tensor<"m1", tensor<4xf32>>) -> !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>
    return %2 : !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>
  }
}

// -----

// All shardings of a function name the sdy mesh called like the fragment's mesh, where there is one.

sdy.mesh @mesh = <["x"=2]>
sdy.mesh @m1 = <["x"=2]>

// CHECK-LABEL: func.func public @manual
// CHECK:       func.func @p0_inferred.main(%arg0: tensor<4xf32> {sdy.sharding = #sdy.sharding<@m1, [{"x"}]>}) -> tensor<4xf32>
// CHECK-NEXT:  sdy.manual_computation(%arg0) in_shardings=[<@m1, [{"x"}]>] out_shardings=[<@m1, [{"x"}]>]
// CHECK:       sdy.sharding_constraint %{{.*}} <@m1, [{}]>
func.func public @manual(%a: !mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>) -> !mpmd.mesh_tensor<"m1", tensor<4xf32>> attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %0 = mpmd.fragment<mesh="m1", origin=[]> (%a) (%p: tensor<4xf32>) {
    %1 = sdy.manual_computation(%p) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>] manual_axes={"x"} (%q: tensor<2xf32>) {
      sdy.return %q : tensor<2xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    %2 = sdy.sharding_constraint %1 <@mesh, [{}]> : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (!mpmd.mesh_tensor<"m1", tensor<4xf32>, sharding=<@mesh, [{"x"}]>>) -> !mpmd.mesh_tensor<"m1", tensor<4xf32>>
  return %0 : !mpmd.mesh_tensor<"m1", tensor<4xf32>>
}

// -----

// CHECK-LABEL: func.func @nothing_to_do
// CHECK-NEXT:  stablehlo.negate
func.func @nothing_to_do(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %a : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A manual computation names the mesh of its fragment, which is created for it; what else is sharded does not change.

!t = !mpmd.mesh_tensor<"m1", tensor<4x8xf32>, sharding=<@all, [{"x"}, {?}]>>

// CHECK:       sdy.mesh @m1 = <["x"=2]>
// CHECK:       sdy.mesh @all = <["x"=2]>
// CHECK:       func.func @p0_f.main(%arg0: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@all, [{"x"}, {?}]>})
// CHECK:       sdy.manual_computation(%arg0) in_shardings=[<@m1, [{"x"}, {}]>] out_shardings=[<@m1, [{"x"}, {}]>] manual_axes={"x"}
module {
  sdy.mesh @all = <["x"=2]>
  func.func @main(%a: !t) -> !t attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
    %0 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4x8xf32>) {
      %1 = sdy.manual_computation(%p) in_shardings=[<@all, [{"x"}, {}]>] out_shardings=[<@all, [{"x"}, {}]>] manual_axes={"x"} (%q: tensor<2x8xf32>) {
        %2 = stablehlo.tanh %q : tensor<2x8xf32>
        sdy.return %2 : tensor<2x8xf32>
      } : (tensor<4x8xf32>) -> tensor<4x8xf32>
      mpmd.return %1 : tensor<4x8xf32>
    } : (!t) -> !t
    return %0 : !t
  }
}

// -----

// Equal fragments are two programs where a name has options of its own; the default of a mesh gives way.

!t = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

// CHECK:       func.func @p0_f.main({{.*}}) -> tensor<4xf32> attributes {mesh_shape = {{.*}}, mpmd.compiler_options = {fast = true, level = 19 : i64}}
// CHECK:       func.func @p1_g.main({{.*}}) -> tensor<4xf32> attributes {mesh_shape = {{.*}}, mpmd.compiler_options = {fast = false, hide = false}}
module attributes {mpmd.compiler_options = [{mesh = "m1", options = {level = 19 : i64}, unless = "effort,hide"}, {options = {fast = true}}, {mesh = "m2", options = {fast = "no"}}, {name = "g", options = {fast = false, hide = false}}]} {
  func.func @main(%a: !t) -> !t attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
    %0 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4xf32>) {
      %1 = stablehlo.tanh %p : tensor<4xf32>
      mpmd.return %1 : tensor<4xf32>
    } : (!t) -> !t
    %2 = mpmd.fragment<mesh="m1", origin=["g"]> (%0) (%p: tensor<4xf32>) {
      %1 = stablehlo.tanh %p : tensor<4xf32>
      mpmd.return %1 : tensor<4xf32>
    } : (!t) -> !t
    return %2 : !t
  }
}

// -----

!t = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

module attributes {mpmd.compiler_options = [{name = "f", options = {fast = true, size = 5.000000e-01 : f64}}, {name = "g", options = {fast = false, size = 5.000000e-01 : f64}}]} {
  func.func @main(%a: !t) -> !t attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
    // expected-error@+1 {{the compiler options fast=True for 'f', fast=False for 'g' contradict: both are in one fragment on mesh 'm1'}}
    %0 = mpmd.fragment<mesh="m1", origin=["f", "g"]> (%a) (%p: tensor<4xf32>) {
      mpmd.return %p : tensor<4xf32>
    } : (!t) -> !t
    return %0 : !t
  }
}

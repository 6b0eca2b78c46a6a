// RUN: mpmd-opt %s -mpmd-infer-mesh-assign-mesh-func-leaves -split-input-file -verify-diagnostics
// RUN: mpmd-opt %s -mpmd-infer-mesh-assign-mesh-func-leaves='infer-transfers=true' -split-input-file | FileCheck %s
// RUN: not mpmd-opt %s -mpmd-infer-mesh-assign-mesh-func-leaves='error-limit=1' -split-input-file 2>&1 | FileCheck %s --check-prefix=ONE

// Where transfers are inferred the first mesh will do; with a limit of one error no program has two.

// CHECK-LABEL: func.func @result
// CHECK: mpmd.assign {origin = "inferred_out"} {{.*}}"m1"
// CHECK-LABEL: func.func @unused
// CHECK: mpmd.assign {origin = "inferred_unused"} {{.*}}"m1"
// ONE: src_set must not be empty for this op
// ONE-NOT: src_set must not be empty for resultless ops

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
func.func @result(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %0 = stablehlo.negate %a {mpmd.src_set = #mpmd.meshes_with_origins<>} : tensor<4xf32>
  // expected-error@+1 {{Func output 0 has no mesh to be assigned to.}}
  return %0 : tensor<4xf32>
}

// -----

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
func.func @unused(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // expected-error@+1 {{src_set must not be empty for this op}}
  %0 = stablehlo.negate %a {mpmd.src_set = #mpmd.meshes_with_origins<>} : tensor<4xf32>
  // expected-error@+1 {{src_set must not be empty for resultless ops}}
  sdy.sharding_group %a group_id=0 {mpmd.src_set = #mpmd.meshes_with_origins<>} : tensor<4xf32>
  return %a : tensor<4xf32>
}

// -----

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
// expected-error@+1 {{Callee @f unused input 0 has no mesh to be assigned to.}}
func.func private @f(%a: tensor<4xf32> {mpmd.src_set = #mpmd.meshes_with_origins<>}) attributes {topology = #topology} {
  return
}

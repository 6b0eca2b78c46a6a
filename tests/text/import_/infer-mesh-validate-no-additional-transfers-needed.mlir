// RUN: mpmd-opt %s -mpmd-infer-mesh-validate-no-additional-transfers-needed -split-input-file -verify-diagnostics
// RUN: not mpmd-opt %s -mpmd-infer-mesh-validate-no-additional-transfers-needed='error-limit=1' -split-input-file 2>&1 | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// Only the last op of a chain is an error.
func.func @chain(%a: tensor<4xf32>) -> !m1 attributes {topology = #topology} {
  %0 = stablehlo.negate %a {mpmd.src_set = #mpmd.meshes_with_origins<"m2">, mpmd.use_set = #mpmd.meshes_with_origins<"m1">} : tensor<4xf32>
  // expected-error@+1 {{Mesh assignment is not possible for op as it is used in {m1} but it can only be placed on {m2}}}
  %1 = stablehlo.tanh %0 {mpmd.src_set = #mpmd.meshes_with_origins<"m2">, mpmd.use_set = #mpmd.meshes_with_origins<"m1">} : tensor<4xf32>
  %2 = mpmd.assign {mpmd.src_set = #mpmd.meshes_with_origins<"m2">, mpmd.use_set = #mpmd.meshes_with_origins<"m1">} %1 : (tensor<4xf32>) -> !m1
  return %2 : !m1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// Without an op in between, the assign itself is the error.
func.func @assign(%a: !m2) -> !m1 attributes {topology = #topology} {
  %0 = mpmd.unassign {mpmd.src_set = #mpmd.meshes_with_origins<"m2">} %a : (!m2) -> tensor<4xf32>
  // expected-error@+1 {{it is used in {m1} but it can only be placed on {m2}}}
  %1 = mpmd.assign {mpmd.src_set = #mpmd.meshes_with_origins<"m2">, mpmd.use_set = #mpmd.meshes_with_origins<"m1">} %0 : (tensor<4xf32>) -> !m1
  return %1 : !m1
}

// -----

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
// expected-error@+1 {{Mesh assignment is not possible for arg0 of mpmd.call "f" as it is used in {m1} but it can only be placed on {m2}}}
func.func private @f(%p: tensor<4xf32> {mpmd.src_set = #mpmd.meshes_with_origins<"m2">, mpmd.use_set = #mpmd.meshes_with_origins<"m1">}) -> tensor<4xf32>
    attributes {topology = #topology} {
  return %p : tensor<4xf32>
}

// -----

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
// Every value that goes from call to call is reported, however many calls there are.
func.func @caller(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %0:2 = mpmd.call @f(%a, %b) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %1:2 = mpmd.call @f(%0#0, %0#1) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %2:2 = mpmd.call @f(%1#0, %1#1) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %2#0 : tensor<4xf32>
}

// expected-error@+2 {{Mesh assignment is not possible for mpmd.call "f" as it passes result 0 to arg 0 but they have mismatching mesh assignments: res: {m2[g]}, arg: {m1}.}}
// expected-error@+1 {{Mesh assignment is not possible for mpmd.call "f" as it passes result 1 to arg 1 but they have mismatching mesh assignments: res: {}, arg: {m1}.}}
func.func private @f(%p: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1">}, %q: tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m1">})
    -> (tensor<4xf32> {mpmd.use_set = #mpmd.meshes_with_origins<"m2"["g"]>}, tensor<4xf32>) attributes {topology = #topology} {
  return %p, %q : tensor<4xf32>, tensor<4xf32>
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>

// Places are named as the user knows them: by the location where a value has no name of its own.
func.func public @places(%a: !m1) -> !m2 attributes {topology = #topology} {
  %0 = mpmd.unassign {origin = "t", mpmd.src_set = #mpmd.meshes_with_origins<"m1"["t"]>} %a : (!m1) -> tensor<4xf32>
  // expected-error-re@+1 {{can only be placed on {m1}{{.*}}named_tensor "t": m1[t]{{.*}}Output "loss": m2[user_out]}}
  %1 = stablehlo.sqrt %0 {mpmd.src_set = #mpmd.meshes_with_origins<"m1"["t"]>, mpmd.use_set = #mpmd.meshes_with_origins<"m2"["user_out"]>} : tensor<4xf32>
  %2 = mpmd.assign {origin = "user_out", mpmd.use_set = #mpmd.meshes_with_origins<"m2"["user_out"]>} %1 : (tensor<4xf32>) -> !m2 loc("loss")
  return %2 : !m2
}

// -----

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
func.func @fine(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %0 = stablehlo.negate %a {mpmd.src_set = #mpmd.meshes_with_origins<"m1", "m2">, mpmd.use_set = #mpmd.meshes_with_origins<"m1">} : tensor<4xf32>
  %1 = stablehlo.tanh %0 {mpmd.use_set = #mpmd.meshes_with_origins<"m1">} : tensor<4xf32>
  return %1 : tensor<4xf32>
}

// -----

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
// With a limit of one the second argument is not told of.
// CHECK: error: Mesh assignment is not possible for arg0 of mpmd.call "g"
// CHECK-NOT: error: Mesh assignment is not possible for arg1
// expected-error@+2 {{Mesh assignment is not possible for arg0 of mpmd.call "g"}}
// expected-error@+1 {{Mesh assignment is not possible for arg1 of mpmd.call "g"}}
func.func private @g(%p: tensor<4xf32> {mpmd.src_set = #mpmd.meshes_with_origins<"m2">, mpmd.use_set = #mpmd.meshes_with_origins<"m1">},
    %q: tensor<4xf32> {mpmd.src_set = #mpmd.meshes_with_origins<"m2">, mpmd.use_set = #mpmd.meshes_with_origins<"m1">}) -> tensor<4xf32>
    attributes {topology = #topology} {
  return %p : tensor<4xf32>
}

// RUN: mpmd-opt %s -mpmd-validate-named-ops-in-mpmd-func -verify-diagnostics | FileCheck %s

#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// CHECK-LABEL: func @in_a_loop
func.func @in_a_loop(%a: tensor<i32>) -> tensor<i32> attributes {topology = #topology} {
  %0 = stablehlo.while(%i = %a) : tensor<i32>
   cond {
    %1 = stablehlo.constant dense<true> : tensor<i1>
    stablehlo.return %1 : tensor<i1>
  } do {
    // expected-error@+1 {{Named computations can only be nested in mpmd functions or mpmd ops.}}
    %2 = mpmd.named_computation<"f"> (%i) (%p: tensor<i32>) {
      mpmd.return %p : tensor<i32>
    } : (tensor<i32>) -> tensor<i32>
    // expected-error@+1 {{Named tensors can only be nested in mpmd functions or mpmd ops.}}
    %3 = mpmd.named_tensor %2 name="t" : tensor<i32>
    stablehlo.return %3 : tensor<i32>
  }
  return %0 : tensor<i32>
}

// CHECK-LABEL: func @without_topology
func.func @without_topology(%a: tensor<i32>) -> tensor<i32> {
  // expected-error@+1 {{Named tensors can only be nested in mpmd functions or mpmd ops.}}
  %0 = mpmd.named_tensor %a name="t" : tensor<i32>
  return %0 : tensor<i32>
}

// CHECK-LABEL: func @fine
func.func @fine(%a: tensor<i32>) -> tensor<i32> attributes {topology = #topology} {
  %0 = mpmd.named_computation<"f"> (%a) (%p: tensor<i32>) {
    %1 = mpmd.named_tensor %p name="t" : tensor<i32>
    mpmd.return %1 : tensor<i32>
  } : (tensor<i32>) -> tensor<i32>
  return %0 : tensor<i32>
}

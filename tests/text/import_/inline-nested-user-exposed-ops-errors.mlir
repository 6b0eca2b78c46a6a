// RUN: mpmd-opt %s -mpmd-inline-nested-user-exposed-ops='assignment=f@m1/0,g@m1/1,t@m2' -split-input-file -verify-diagnostics

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
func.func @both(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %0 = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
    // expected-error@+1 {{NamedComputation 'g' is nested in a NamedComputation 'f' which has a different mesh or stage assignment.}}
    %1 = mpmd.named_computation<"g"> (%p) (%q: tensor<4xf32>) {
      mpmd.return %q : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    // expected-error@+1 {{NamedTensor 't' is nested in a NamedComputation 'f' which has a different mesh assignment.}}
    %2 = mpmd.named_tensor %1 name="t" : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A name is compared with what is around it, not with what is around that.

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
func.func @three(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  %0 = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {
    // expected-error@+1 {{NamedComputation 'g' is nested in a NamedComputation 'f' which has a different mesh or stage assignment.}}
    %1 = mpmd.named_computation<"g"> (%p) (%q: tensor<4xf32>) {
      // expected-error@+1 {{NamedComputation 'f' is nested in a NamedComputation 'g' which has a different mesh or stage assignment.}}
      %2 = mpmd.named_computation<"f"> (%q) (%r: tensor<4xf32>) {
        mpmd.return %r : tensor<4xf32>
      } : (tensor<4xf32>) -> tensor<4xf32>
      mpmd.return %2 : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>
func.func @parent(%a: tensor<4xf32>) -> tensor<4xf32> attributes {topology = #topology} {
  // expected-error@+1 {{Parent NamedComputation 'h' is not assigned}}
  %0 = mpmd.named_computation<"h"> (%a) (%p: tensor<4xf32>) {
    %1 = mpmd.named_computation<"g"> (%p) (%q: tensor<4xf32>) {
      mpmd.return %q : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

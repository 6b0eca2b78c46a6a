// RUN: mpmd-opt %s -mpmd-call-inline -split-input-file -verify-diagnostics

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

func.func public @main(%a: !m1) -> !m1 attributes {topology = #topology} {
  // expected-error@+1 {{@main calls @body, which has no body in this module}}
  %0 = mpmd.call @body(%a) : (!m1) -> !m1
  return %0 : !m1
}
func.func private @body(!m1) -> !m1 attributes {topology = #topology}

// -----

// Both calls that cannot be inlined are told.  (In MPMD functions the dialect's own verifier refuses them.)

func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error@+1 {{@main calls @outer, which has calls itself: the work of one microbatch cannot consist of other microbatches, nor of itself}}
  %0 = mpmd.call @outer(%a) {call_counter = 0 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  // expected-error@+1 {{@main calls @outer, which has calls itself}}
  %1 = mpmd.call @outer(%0) {call_counter = 1 : ui32} : (tensor<4xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}
func.func private @outer(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = mpmd.call @inner(%a) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @inner(%a: tensor<4xf32>) -> tensor<4xf32> {
  return %a : tensor<4xf32>
}

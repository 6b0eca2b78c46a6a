// RUN: mpmd-opt %s -mpmd-validate-no-param-transfers -verify-diagnostics
// RUN: not mpmd-opt %s -mpmd-validate-no-param-transfers='fail-on-param-transfers=true param-pattern=other' 2>&1 | FileCheck %s

// CHECK: error: Detected cross-mesh transfer of a parameter matching "other" from mesh "m1" to "m2". JAX locations: [

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4xf32>>

func.func public @main(%a: !m1 loc("params['transformer']['w']"), %b: !m1 loc("params['other']")) -> (!m2, !m2, !m1, !m2)
    attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>>} {
  // expected-warning@+1 {{Detected cross-mesh transfer of a parameter matching "params['transformer" from mesh "m1" to "m2". JAX locations: [}}
  %s = mpmd.transfer %a : (!m1) -> !m2
  %t = mpmd.transfer %b : (!m1) -> !m2
  %u = mpmd.transfer %a : (!m1) -> !m1
  %v = mpmd.transfer %s : (!m2) -> !m2
  return %s, %t, %u, %v : !m2, !m2, !m1, !m2
}

// RUN: mpmd-opt %s -mpmd-mark-fragment-reserved-memory -split-input-file -verify-diagnostics | FileCheck %s

sdy.mesh @mesh = <["x"=2, "y"=2]>
!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
!s1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>, sharding=<@mesh, [{"x", "y"}]>>
!b1 = !mpmd.mesh_tensor<"m1", tensor<8xi1>>
!h1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>, memory_kind="pinned_host">
!m2 = !mpmd.mesh_tensor<"m2", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2, "y"=2]>>, <"m2" : <["x"=2, "y"=2]>>>

// 32 bytes each; a quarter on each device for %s; a byte per truth value for %b; nothing for the host. f: %s 8,
// %b 8. g: also %a and f's result, 64. The donated %d counts for f, which reads it, and no more.

// CHECK-LABEL: func.func public @main
// CHECK:       origin=["f"]> {{.*}}reserved_hbm_bytes = 16 : i64
// CHECK:       origin=["g"]> {{.*}}reserved_hbm_bytes = 72 : i64
// CHECK:       origin=["k"]> {{.*}}reserved_hbm_bytes = 0 : i64
func.func public @main(%a: !m1, %d: !m1 {jax.buffer_donor = true}, %s: !s1, %b: !b1, %h: !h1) -> (!m1, !s1, !m2) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %d, %h) (%p: tensor<8xf32>, %q: tensor<8xf32>, %r: tensor<8xf32>) {
    mpmd.return %p : tensor<8xf32>
  } : (!m1, !m1, !h1) -> !m1
  %t = mpmd.transfer %f : (!m1) -> !m2
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%s) (%p: tensor<8xf32>) {
    mpmd.return %p : tensor<8xf32>
  } : (!s1) -> !s1
  %k = mpmd.fragment<mesh="m2", origin=["k"]> (%t) (%p: tensor<8xf32>) {
    mpmd.return %p : tensor<8xf32>
  } : (!m2) -> !m2
  return %f, %g, %k : !m1, !s1, !m2
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

func.func public @stranger(%a: !m1) -> !m1 attributes {topology = #topology} {
  // expected-error@+1 {{Expected only TransferOp, FragmentOp, FragmentCallOp and ReturnOp in the function body. The memory of mpmd.call}}
  %f = mpmd.call @callee(%a) : (!m1) -> !m1
  return %f : !m1
}
func.func private @callee(%a: !m1) -> !m1 attributes {topology = #topology} {
  return %a : !m1
}

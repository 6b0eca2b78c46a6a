// RUN: mpmd-opt %s -mpmd-mark-input-output-with-layouts -split-input-file -verify-diagnostics | FileCheck %s

!m1 = !mpmd.mesh_tensor<"m1", tensor<4x8xf32>>
!m2 = !mpmd.mesh_tensor<"m2", tensor<4x8xf32>>
!c1 = !mpmd.mesh_tensor<"m1/cpu", tensor<4x8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>, <"m2" : <["x"=2]>>, <"m1/cpu" : <["x"=2]>>>

// A custom layout reaches all readers, also behind a transfer; automatic is only what one fragment reads; a
// result has the layout that the user wants for it, and none is left open that nobody reads.

// CHECK-LABEL: func.func public @main
// CHECK-SAME:  %arg0: {{[^{]*}}{mhlo.layout_mode = "{0, 1}"}, %arg1: {{[^{]*}}{mhlo.layout_mode = "auto"}, %arg2: !mpmd.mesh_tensor<"m1", tensor<4x8xf32>>)
// CHECK:       origin=["f"]> {{.*}} {arg_attrs = [{mhlo.layout_mode = "{0, 1}"}, {mhlo.layout_mode = "auto"}, {}], res_attrs = [{mhlo.layout_mode = "{0, 1}"}, {mhlo.layout_mode = "auto"}]}
// CHECK:       mpmd.transfer
// CHECK:       origin=["g"]> {{.*}} {arg_attrs = [{mhlo.layout_mode = "{0, 1}"}, {}], res_attrs = [{mhlo.layout_mode = "auto"}]}
// CHECK:       origin=["h"]> {{.*}} {arg_attrs = [{mhlo.layout_mode = "{0, 1}"}], res_attrs = [{}]}
func.func public @main(%a: !m1 {mhlo.layout_mode = "{0, 1}"}, %b: !m1 {mhlo.layout_mode = "auto"}, %c: !m1 {mhlo.layout_mode = "auto"})
    -> (!m1 {mhlo.layout_mode = "{0, 1}"}, !m2, !m1 {mhlo.layout_mode = "auto"}) attributes {topology = #topology} {
  %f:2 = mpmd.fragment<mesh="m1", origin=["f"]> (%a, %b, %c) (%p: tensor<4x8xf32>, %q: tensor<4x8xf32>, %r: tensor<4x8xf32>) {
    mpmd.return %p, %q : tensor<4x8xf32>, tensor<4x8xf32>
  } : (!m1, !m1, !m1) -> (!m1, !m1)
  %t = mpmd.transfer %a : (!m1) -> !m2
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%a, %c) (%p: tensor<4x8xf32>, %q: tensor<4x8xf32>) {
    mpmd.return %q : tensor<4x8xf32>
  } : (!m1, !m1) -> !m1
  %h = mpmd.fragment<mesh="m2", origin=["h"]> (%t) (%p: tensor<4x8xf32>) {
    mpmd.return %p : tensor<4x8xf32>
  } : (!m2) -> !m2
  return %f#0, %h, %g : !m1, !m2, !m1
}

// A result that is returned in any layout, and read by another fragment, has the default.

// CHECK-LABEL: func.func public @returned_and_read
// CHECK:       origin=["f"]> {{.*}} {arg_attrs = [{}], res_attrs = [{}]}
func.func public @returned_and_read(%a: !m1 {mhlo.layout_mode = "{0, 1}"}, %b: !m1)
    -> (!m1 {mhlo.layout_mode = "auto"}, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%b) (%p: tensor<4x8xf32>) {
    mpmd.return %p : tensor<4x8xf32>
  } : (!m1) -> !m1
  %g = mpmd.fragment<mesh="m1", origin=["g"]> (%f, %a) (%p: tensor<4x8xf32>, %q: tensor<4x8xf32>) {
    mpmd.return %p : tensor<4x8xf32>
  } : (!m1, !m1) -> !m1
  return %f, %g : !m1, !m1
}

// Host meshes know the default only.

// CHECK-LABEL: func.func public @to_the_host
// CHECK-NOT:   layout_mode
func.func public @to_the_host(
    // expected-warning@+1 {{Arg #0 is used in a transfer op, but with a non-default layout: "{0, 1}". Forcing the layout to default.}}
    %a: !m1 {mhlo.layout_mode = "{0, 1}"}) -> !c1 attributes {topology = #topology} {
  %t = mpmd.transfer %a : (!m1) -> !c1
  return %t : !c1
}

// -----

!m1 = !mpmd.mesh_tensor<"m1", tensor<4x8xf32>>
#topology = #mpmd.topology<<"m1" : <["x"=2]>>>

// expected-error@+1 {{Arg #0 is returned as result #0, but with incompatible layouts: "{0, 1}" vs. "{1, 0}"}}
func.func public @conflicts(
    %a: !m1 {mhlo.layout_mode = "{0, 1}"})
    -> (!m1 {mhlo.layout_mode = "{1, 0}"}, !m1 {mhlo.layout_mode = "auto"}, !m1 {mhlo.layout_mode = "{0, 1}"}, !m1) attributes {topology = #topology} {
  %f = mpmd.fragment<mesh="m1", origin=["f"]> (%a) (%p: tensor<4x8xf32>) {
    mpmd.return %p : tensor<4x8xf32>
  } : (!m1) -> !m1
  // expected-error@+1 {{Result #3 is also returned as result #2, but with incompatible layouts: <<NULL ATTRIBUTE>> vs. "{0, 1}"}}
  return %a, %f, %f, %f : !m1, !m1, !m1, !m1
}

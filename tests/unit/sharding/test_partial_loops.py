"""Loops that build up terms carry them in partial form."""

from __future__ import annotations

import numpy as np
import pytest

from mpmd import ir
from tests.support.partial_forms import DOT, T, arguments, body_of, check, run

LOOP = """(%a: tensor<6x4xf32>, %b: tensor<6x5xf32>, %s: tensor<3x4x5xf32>) -> {kind} {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %end = stablehlo.constant dense<3> : tensor<i32>
  %limit = stablehlo.constant dense<1.0e6> : tensor<f32>
  %none = stablehlo.constant dense<{start}> : {kind}
  %l:2 = stablehlo.while(%i = %zero, %g = %none) : tensor<i32>, {kind}
  cond {{
    %c = stablehlo.compare LT, %i, %end, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    {condition}
    stablehlo.return %c : tensor<i1>
  }} do {{
    %k = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>
    %m = stablehlo.broadcast_in_dim %k, dims = [] : (tensor<f32>) -> tensor<6x4xf32>
    %x = stablehlo.add %a, %m : tensor<6x4xf32>
    %d = stablehlo.dot_general %x, %b, contracting_dims = [0] x [0] :
      (tensor<6x4xf32>, tensor<6x5xf32>) -> tensor<4x5xf32>
    {step}
    %n = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %n, %h : tensor<i32>, {kind}
  }}
  return %l#1 : {kind} }}"""
STACK = "tensor<3x4x5xf32>"
UPDATE = (
    f"%e = stablehlo.reshape %d : ({T}) -> tensor<1x4x5xf32>\n"
    f"%h = stablehlo.dynamic_update_slice %g, %e, %i, %zero, %zero : "
    f"({STACK}, tensor<1x4x5xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> {STACK}"
)


def loop(step: str, kind: str = T, start: str = "0.0", condition: str = "") -> str:
    return LOOP.format(step=step, kind=kind, start=start, condition=condition)


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (f"%h = stablehlo.add %g, %d : {T}", T),
        (f"%h = stablehlo.add %d, %g : {T}", T),
        (UPDATE, STACK),
    ],
    ids=["added", "added from the left", "stacked"],
)
def test_a_loop_that_builds_up_terms(step, kind):
    check(body_of(loop(step, kind), a="x/", b="x/"), "x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (loop(f"%h = stablehlo.add %g, %d : {T}", start="1.0"), "another start"),
        (loop(f"%h = stablehlo.subtract %g, %d : {T}"), "the total is not only added to"),
        (loop(f"%t = stablehlo.tanh %d : {T}  %h = stablehlo.add %g, %t : {T}"), "not linear"),
        (loop(f"%t = stablehlo.multiply %g, %d : {T}  %h = stablehlo.add %g, %t : {T}"), "the total is read"),
        (loop(f"%h = stablehlo.add %g, %d : {T}  %u = stablehlo.tanh %h : {T}"), "the new total is read"),
        (loop(f"%h = stablehlo.add %g, %g : {T}"), "nothing is added"),
        (loop(f"%h = stablehlo.negate %d : {T}"), "the last value alone"),
        (
            loop(
                f"%h = stablehlo.add %g, %d : {T}",
                condition="%f = stablehlo.slice %g [0:1, 0:1] : (tensor<4x5xf32>) -> tensor<1x1xf32>",
            ),
            "the condition reads the total",
        ),
        (loop(UPDATE, STACK, start="1.0"), "another start of a stack"),
        (loop(UPDATE.replace("%g, %e", "%s, %e"), STACK), "another stack"),
    ],
    ids=lambda value: value if "stablehlo" not in value else "",
)
def test_a_loop_without_terms(text, reason):
    assert body_of(text, a="x/", b="x/").form() is None


def test_a_loop_whose_other_results_stay():
    """Both the value and its form are read: the loop runs once, and the value is the sum of the form."""
    text = loop(f"%h = stablehlo.add %g, %d : {T}").replace(
        f"return %l#1 : {T}", f"%q = stablehlo.tanh %l#1 : {T}\nreturn %l#1 : {T}"
    )
    check(body_of(text, a="x/", b="x/"), "x")


def test_a_loop_inside_of_a_loop():
    inner = f"""%w:2 = stablehlo.while(%j = %zero, %o = %nothing) : tensor<i32>, {T}
      cond {{
        %p = stablehlo.compare LT, %j, %end, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      }} do {{
        %v = stablehlo.add %o, %d : {T}
        %y = stablehlo.add %j, %one : tensor<i32>
        stablehlo.return %y, %v : tensor<i32>, {T}
      }}
      %e = stablehlo.reshape %w#1 : ({T}) -> tensor<1x4x5xf32>"""
    step = f"%nothing = stablehlo.constant dense<0.0> : {T}\n" + inner + UPDATE[UPDATE.index("\n") :]
    check(body_of(loop(step, STACK), a="x/", b="x/"), "x")


def test_two_results_of_a_loop_of_which_one_has_terms():
    text = f"""(%a: tensor<6x4xf32>, %b: tensor<6x5xf32>) -> ({T}, {T}) {{
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %end = stablehlo.constant dense<3> : tensor<i32>
      %none = stablehlo.constant dense<0.0> : {T}
      %l:3 = stablehlo.while(%i = %zero, %g = %none, %h = %none) : tensor<i32>, {T}, {T}
      cond {{
        %c = stablehlo.compare LT, %i, %end, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      }} do {{
        {DOT}
        %s = stablehlo.add %g, %d : {T}
        %t = stablehlo.multiply %d, %d : {T}
        %u = stablehlo.add %h, %t : {T}
        %n = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %n, %s, %u : tensor<i32>, {T}, {T}
      }}
      return %l#1, %l#2 : {T}, {T} }}"""
    body = body_of(text, a="x/", b="x/")
    module, main = body.module, body.main
    given = arguments(main)
    want = run(module, given)
    form = body.form(0)
    assert form is not None and body.form(1) is None
    main.returned = [form.build(), main.returned[1]]
    ir.return_types_changed(main)
    got = run(module, given)
    np.testing.assert_allclose(got[0].sum(0), want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)

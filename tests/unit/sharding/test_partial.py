"""The sum of a partial form over its first dim is the value; otherwise a value has none."""

from __future__ import annotations

import numpy as np
import pytest

from mpmd import ir
from tests.support.partial_forms import DOT, A, B, T, arguments, body_of, check

HEAD = f"(%a: {A}, %b: {B}) -> {T} {{ {DOT}"


def after_a_product(ops: str, kind: str = "tensor<4x5xf32>", more: str = "") -> str:
    """A body that goes on with `%d`, a product, and returns `%r`."""
    return (
        f"(%a: tensor<6x4xf32>, %b: tensor<6x5xf32>{more}) -> {kind} {{ {DOT}\n{ops}\nreturn %r : {kind} }}"
    )


def sum_of(
    value: str, before: str, after: str, dims: str, init: str = "0.0", op: str = "add", result: str = "%r"
) -> str:
    element = before.rpartition("x")[2].rstrip(">")
    return (
        f"%init = stablehlo.constant dense<{init}> : tensor<{element}>\n"
        f"{result} = stablehlo.reduce({value} init: %init) applies stablehlo.{op} across "
        f"dimensions = [{dims}] : "
        f"({before}, tensor<{element}>) -> {after}"
    )


# -- where they begin -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("splits", "axes"),
    [
        ({"a": "x/", "b": "x/"}, ("x",)),
        ({"a": "x/", "b": "/"}, ("x",)),
        ({"b": "x/"}, ("x",)),
        ({"a": "y,x/", "b": "y,x/"}, ("y", "x")),
        ({"a": "x/y", "b": "x/"}, ("x",)),
    ],
)
def test_a_product_over_a_split_dim(splits, axes):
    check(body_of(HEAD + "\nreturn %d : tensor<4x5xf32> }", **splits), *axes)


def test_the_terms_of_a_product_are_those_of_blocks_of_rows():
    body = body_of(HEAD + "\nreturn %d : tensor<4x5xf32> }", a="y/")
    a, b = arguments(body.main)
    (terms,) = check(body, "y")
    np.testing.assert_allclose(terms, np.stack([a[i : i + 2].T @ b[i : i + 2] for i in (0, 2, 4)]), rtol=1e-5)


@pytest.mark.parametrize(
    "splits",
    [
        {},
        {"a": "/x", "b": "/y"},
        {"a": "x/", "b": "y/"},
        {"a": "x:(1)2/"},
        {"a": "one/"},
    ],
    ids=["whole", "free dims", "different axes", "a part of an axis", "one device"],
)
def test_a_product_without_terms(splits):
    assert body_of(HEAD + "\nreturn %d : tensor<4x5xf32> }", **splits).form() is None


BATCHED = (
    "(%a: tensor<3x4x7x6xf32>, %b: tensor<6x4x3x5xf32>) -> tensor<3x7x5xf32> {"
    "%d = stablehlo.dot_general %a, %b, batching_dims = [0] x [2], contracting_dims = [1, 3] x [1, 0] : "
    "(tensor<3x4x7x6xf32>, tensor<6x4x3x5xf32>) -> tensor<3x7x5xf32>  return %d : tensor<3x7x5xf32> }"
)


@pytest.mark.parametrize(
    ("splits", "axes"),
    [
        ({"a": "/x//"}, ("x",)),
        ({"a": "///y"}, ("y",)),
        ({"a": "/x//y"}, ("x", "y")),
        ({"a": "/x//", "b": "y///"}, ("x", "y")),
        ({"a": "y/x//"}, ("x",)),
    ],
)
def test_a_product_with_batch_dims_and_two_contracted_ones(splits, axes):
    check(body_of(BATCHED, **splits), *axes)


def test_an_axis_of_two_contracted_dims():
    assert body_of(BATCHED, a="/x//", b="x///").form() is None


def test_dims_that_their_axes_do_not_divide():
    text = (
        "(%a: tensor<5x4xf32>, %b: tensor<5x5xf32>) -> tensor<4x5xf32> { %d = stablehlo.dot_general %a, %b, "
        "contracting_dims = [0] x [0] : (tensor<5x4xf32>, tensor<5x5xf32>) -> tensor<4x5xf32>"
        "  return %d : tensor<4x5xf32> }"
    )
    assert body_of(text, a="x/").form() is None
    reduced = "(%a: tensor<5x4xf32>) -> tensor<4xf32> {" + sum_of(
        "%a", "tensor<5x4xf32>", "tensor<4xf32>", "0"
    )
    assert body_of(reduced + " return %r : tensor<4xf32> }", a="x/").form() is None


def test_integers_have_no_terms():
    """Sums of them are exact in any order: nothing is known yet of what reads them."""
    text = HEAD.replace("f32", "i32") + "\nreturn %d : tensor<4x5xi32> }"
    assert body_of(text, a="x/").form() is None


SUMMED = "(%a: tensor<6x4x2xf32>) -> tensor<{1}xf32> {{{0} return %r : tensor<{1}xf32> }}"


@pytest.mark.parametrize(
    ("dims", "after", "split", "axes"),
    [
        ("0", "4x2", "x//", ("x",)),
        ("0, 1", "2", "y/x/", ("y", "x")),
        ("0, 2", "4", "y//x", ("y", "x")),
        ("0, 2", "4", "y/x/", ("y",)),
        ("1, 0", "2", "y/x/", ("x", "y")),
        ("2, 0", "4", "y//x", ("x", "y")),
    ],
)
def test_a_sum_over_split_dims(dims, after, split, axes):
    text = SUMMED.format(sum_of("%a", "tensor<6x4x2xf32>", f"tensor<{after}xf32>", dims), after)
    check(body_of(text, a=split), *axes)


@pytest.mark.parametrize(
    ("init", "op", "split"),
    [
        ("1.0", "add", "x//"),
        ("0.0", "maximum", "x//"),
        ("0.0", "add", "/x/"),
        ("0.0", "add", "one//"),
        ("0.0", "add", "x:(1)2//"),
    ],
    ids=["another start", "no sum", "a dim that stays", "one device", "a part of an axis"],
)
def test_a_reduction_without_terms(init, op, split):
    text = SUMMED.format(sum_of("%a", "tensor<6x4x2xf32>", "tensor<4x2xf32>", "0", init, op), "4x2")
    assert body_of(text, a=split).form() is None


def test_a_reduction_of_two_operands_has_no_terms():
    text = """(%a: tensor<6xf32>, %b: tensor<6xf32>) -> tensor<f32> {
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %r:2 = stablehlo.reduce(%a init: %z), (%b init: %z) across dimensions = [0] :
        (tensor<6xf32>, tensor<6xf32>, tensor<f32>, tensor<f32>) -> (tensor<f32>, tensor<f32>)
        reducer(%p: tensor<f32>, %q: tensor<f32>) (%s: tensor<f32>, %t: tensor<f32>) {
          %0 = stablehlo.add %p, %q : tensor<f32>
          %1 = stablehlo.add %s, %t : tensor<f32>
          stablehlo.return %0, %1 : tensor<f32>, tensor<f32>
        }
      return %r#0 : tensor<f32> }"""
    assert body_of(text, a="x", b="x").form() is None


REDUCER = """(%a: tensor<6xf32>) -> tensor<f32> {{
  %z = stablehlo.constant dense<0.0> : tensor<f32>
  %r = stablehlo.reduce(%a init: %z) across dimensions = [0] : (tensor<6xf32>, tensor<f32>) -> tensor<f32>
    reducer(%p: tensor<f32>, %q: tensor<f32>) {{ {0} }}
  return %r : tensor<f32> }}"""


@pytest.mark.parametrize(
    "region",
    [
        "%0 = stablehlo.add %p, %p : tensor<f32>  stablehlo.return %0 : tensor<f32>",
        "%0 = stablehlo.add %p, %z : tensor<f32>  stablehlo.return %0 : tensor<f32>",
        "%0 = stablehlo.add %p, %q : tensor<f32>  stablehlo.return %p : tensor<f32>",
        "%0 = stablehlo.add %p, %q : tensor<f32>  %1 = stablehlo.tanh %0 : tensor<f32>  "
        "stablehlo.return %1 : tensor<f32>",
    ],
)
def test_a_reducer_that_does_not_add_both(region):
    assert body_of(REDUCER.format(region), a="x").form() is None


SCATTER = """({5}%i: tensor<6x1xi32>, %u: tensor<6x5xf32>) -> tensor<4x5xf32> {{
  %z = stablehlo.constant dense<{0}> : tensor<4x5xf32>
  %r = "stablehlo.scatter"(%{1}, %i, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<
    update_window_dims = [1], inserted_window_dims = [0],
    scatter_dims_to_operand_dims = [0], index_vector_dim = 1>,
    indices_are_sorted = false, unique_indices = {4}}}> ({{
    ^bb0(%p: tensor<f32>, %q: tensor<f32>):
      %0 = stablehlo.{2} %p, %q : tensor<f32>
      stablehlo.return %0 : tensor<f32>
  }}) : (tensor<4x5xf32>, tensor<6x1xi32>, tensor<6x5xf32>) -> tensor<4x5xf32>
  {3} return %r : tensor<4x5xf32> }}"""


def scatter(start="0.0", target="z", op="add", after="", unique="false"):
    extra = "%t: tensor<4x5xf32>, " if target == "t" else ""
    return SCATTER.format(start, target, op, after, unique, extra)


@pytest.mark.parametrize(
    ("splits", "axes"),
    [
        ({"i": "x/", "u": "x/"}, ("x",)),
        ({"u": "x/"}, ("x",)),
        ({"i": "y/"}, ("y",)),
        ({"u": "y,x/"}, ("y", "x")),
        ({"u": "x/y"}, ("x",)),
    ],
)
def test_a_scatter_of_split_updates(splits, axes):
    check(body_of(scatter(), **splits), *axes)


@pytest.mark.parametrize(
    ("text", "splits"),
    [
        (scatter(start="1.0"), {"u": "x/"}),
        (scatter(target="t"), {"u": "x/"}),
        (scatter(op="maximum"), {"u": "x/"}),
        (scatter(), {"u": "/x"}),
        (scatter(), {"u": "one/"}),
        (scatter(), {"u": "four/"}),
        (scatter(), {}),
    ],
    ids=["into ones", "into an argument", "no sum", "windows are split", "one device", "uneven", "whole"],
)
def test_a_scatter_without_terms(text, splits):
    assert body_of(text, **splits).form() is None


TWO_DIMS = """(%i: tensor<6x2x1xi32>, %u: tensor<{0}xf32>) -> tensor<4x5xf32> {{
  %z = stablehlo.constant dense<0.0> : tensor<4x5xf32>
  %r = "stablehlo.scatter"(%z, %i, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<
    update_window_dims = [{1}], inserted_window_dims = [0],
    scatter_dims_to_operand_dims = [0], index_vector_dim = 2>}}> ({{
    ^bb0(%p: tensor<f32>, %q: tensor<f32>):
      %0 = stablehlo.add %p, %q : tensor<f32>
      stablehlo.return %0 : tensor<f32>
  }}) : (tensor<4x5xf32>, tensor<6x2x1xi32>, tensor<{0}xf32>) -> tensor<4x5xf32>
  return %r : tensor<4x5xf32> }}"""


@pytest.mark.parametrize("shape", ["6x2x5", "6x5x2", "5x6x2"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_scatter_with_two_dims_of_updates(shape, dim):
    window = shape.split("x").index("5")
    split = ["", "", ""]
    split[[d for d in range(3) if d != window][dim]] = "x"
    check(body_of(TWO_DIMS.format(shape, window), u="/".join(split)), "x")


def test_a_scatter_with_two_split_dims_has_no_terms():
    assert body_of(TWO_DIMS.format("6x2x5", 2), u="y/x/").form() is None


# -- what they pass through -------------------------------------------------------------------------------

C = f"%c = stablehlo.constant dense<0.3> : {T}\n"
LINEAR = {
    "negate": (f"%r = stablehlo.negate %d : {T}", T),
    "convert": (f"%r = stablehlo.convert %d : ({T}) -> tensor<4x5xf64>", "tensor<4x5xf64>"),
    "add": (f"{C}%n = stablehlo.multiply %d, %c : {T}  %r = stablehlo.add %n, %d : {T}", T),
    "subtract": (f"%n = stablehlo.negate %d : {T}  %r = stablehlo.subtract %d, %n : {T}", T),
    "used twice": (f"%r = stablehlo.add %d, %d : {T}", T),
    "product": (f"{C}%r = stablehlo.multiply %d, %c : {T}", T),
    "product from the left": (f"{C}%r = stablehlo.multiply %c, %d : {T}", T),
    "quotient": (f"{C}%r = stablehlo.divide %d, %c : {T}", T),
    "reshape": (f"%r = stablehlo.reshape %d : ({T}) -> tensor<2x10xf32>", "tensor<2x10xf32>"),
    "transpose": (
        f"%r = stablehlo.transpose %d, dims = [1, 0] : ({T}) -> tensor<5x4xf32>",
        "tensor<5x4xf32>",
    ),
    "broadcast": (
        f"%r = stablehlo.broadcast_in_dim %d, dims = [2, 0] : ({T}) -> tensor<5x3x4xf32>",
        "tensor<5x3x4xf32>",
    ),
    "slice": (f"%r = stablehlo.slice %d [1:4:2, 0:3] : ({T}) -> tensor<2x3xf32>", "tensor<2x3xf32>"),
    "pad": (
        f"%z = stablehlo.constant dense<0.0> : tensor<f32>\n%r = stablehlo.pad %d, %z, "
        "low = [1, 0], high = [0, -1], "
        f"interior = [1, 0] : ({T}, tensor<f32>) -> tensor<8x4xf32>",
        "tensor<8x4xf32>",
    ),
    "reverse": (f"%r = stablehlo.reverse %d, dims = [1] : {T}", T),
    "concatenate": (
        f"%r = stablehlo.concatenate %d, %d, dim = 1 : ({T}, {T}) -> tensor<4x10xf32>",
        "tensor<4x10xf32>",
    ),
    "sum over another dim": (sum_of("%d", T, "tensor<4xf32>", "1"), "tensor<4xf32>"),
    "all of them": (
        f"{C}%0 = stablehlo.multiply %d, %c : {T}\n"
        f"%1 = stablehlo.transpose %0, dims = [1, 0] : ({T}) -> tensor<5x4xf32>\n"
        "%2 = stablehlo.reshape %1 : (tensor<5x4xf32>) -> tensor<20xf32>\n"
        "%r = stablehlo.negate %2 : tensor<20xf32>",
        "tensor<20xf32>",
    ),
}


@pytest.mark.parametrize("split", ["x/", "y,x/"])
@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_takes_terms_one_by_one(name, split):
    ops, kind = LINEAR[name]
    check(body_of(after_a_product(ops, kind), a=split), *split[:-1].split(","))


def test_a_constraint_says_nothing_about_terms():
    ops = f'%r = sdy.sharding_constraint %d <mesh<["x"=2]>, [{{}}, {{}}]> : {T}'
    body = body_of(after_a_product(ops), a="x/")
    form = body.form()
    assert form is not None and form.axes == ("x",)
    assert form.build().type.shape == [2, 4, 5]


def test_terms_of_factors_that_are_whole_along_the_axes():
    ops = f"%r = stablehlo.multiply %d, %f : {T}"
    check(body_of(after_a_product(ops, more=f", %f: {T}"), a="x/", f="/y"), "x")


NOT_LINEAR = {
    "tanh": f"%r = stablehlo.tanh %d : {T}",
    "absolute value": f"%r = stablehlo.abs %d : {T}",
    "square": f"%r = stablehlo.multiply %d, %d : {T}",
    "inverse": f"{C}%r = stablehlo.divide %c, %d : {T}",
    "a constant is added": f"{C}%r = stablehlo.add %d, %c : {T}",
    "a constant is subtracted": f"{C}%r = stablehlo.subtract %c, %d : {T}",
    "minimum": f"{C}%r = stablehlo.minimum %d, %c : {T}",
    "where": (
        f"%p = stablehlo.compare GT, %d, %d : ({T}, {T}) -> tensor<4x5xi1>\n"
        f"%r = stablehlo.select %p, %d, %d : tensor<4x5xi1>, {T}"
    ),
    "other padding": (
        "%z = stablehlo.constant dense<1.0> : tensor<f32>\n"
        "%r = stablehlo.pad %d, %z, low = [1, 0], high = [-1, 0], interior = [0, 0] : "
        f"({T}, tensor<f32>) -> {T}"
    ),
    "beside a constant": (
        f"{C}%k = stablehlo.concatenate %d, %c, dim = 0 : ({T}, {T}) -> tensor<8x5xf32>\n"
        f"%r = stablehlo.slice %k [0:4, 0:5] : (tensor<8x5xf32>) -> {T}"
    ),
    "nonlinear in between": f"%t = stablehlo.exponential %d : {T}  %r = stablehlo.negate %t : {T}",
    "start of a sum": (
        f"%k = stablehlo.reshape %d : ({T}) -> tensor<4x5x1xf32>\n"
        + sum_of("%k", "tensor<4x5x1xf32>", T, "2", "1.0")
    ),
    "rounded to integers": (
        f"%k = stablehlo.convert %d : ({T}) -> tensor<4x5xi32>\n"
        f"%r = stablehlo.convert %k : (tensor<4x5xi32>) -> {T}"
    ),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_needs_the_value(name):
    assert body_of(after_a_product(NOT_LINEAR[name]), a="x/").form() is None


def test_terms_along_different_axes_are_not_added():
    text = (
        f"(%a: {A}, %b: {B}, %f: {A}, %g: {B}) -> {T} {{ {DOT}\n"
        f"%e = stablehlo.dot_general %f, %g, contracting_dims = [0] x [0] : ({A}, {B}) -> {T}\n"
        f"%r = stablehlo.{{0}} %d, %e{{1}} }}"
    )
    for op in ("add", "subtract"):
        body = text.replace("{0}", op).replace("{1}", f" : {T} return %r : {T}").replace("}}", "}")
        check(body_of(body, a="x/", f="x/"), "x")
        assert body_of(body, a="x/", f="y/").form() is None
        assert body_of(body, a="x/").form() is None
    joined = (
        f", dim = 0 : ({T}, {T}) -> tensor<8x5xf32>\n"
        f"%s = stablehlo.slice %r [2:6, 0:5] : (tensor<8x5xf32>) -> {T} return %s : {T}"
    )
    body = text.replace("{0}", "concatenate").replace("{1}", joined).replace("}}", "}")
    check(body_of(body, a="x/", f="x/"), "x")
    assert body_of(body, a="x/", f="y/").form() is None


def test_a_factor_that_is_split_along_the_axis():
    ops = f"%r = stablehlo.multiply %d, %f : {T}"
    assert body_of(after_a_product(ops, more=f", %f: {T}"), a="x/", f="x/").form() is None


def test_two_values_with_terms_are_not_multiplied():
    ops = f"%n = stablehlo.negate %d : {T}  %r = stablehlo.multiply %n, %d : {T}"
    assert body_of(after_a_product(ops), a="x/").form() is None


def test_a_sum_over_a_dim_that_is_split_has_terms_of_its_own():
    """What it adds up is whole along the other axis, as activations are."""
    ops = sum_of("%d", T, "tensor<5xf32>", "0")
    check(body_of(after_a_product(ops, "tensor<5xf32>"), a="y/", dot_general="x/"), "x")


def test_arguments_have_no_terms():
    body = body_of(f"(%a: {T}) -> {T} {{ return %a : {T} }}", a="x/")
    assert body.form() is None


def test_two_results_share_the_ops_of_what_they_share():
    text = (
        f"(%a: {A}, %b: {B}) -> ({T}, {T}) {{ {DOT}\n"
        f"%n = stablehlo.negate %d : {T}  return %d, %n : {T}, {T} }}"
    )
    body = body_of(text, a="x/")
    terms, negated = check(body, "x")
    np.testing.assert_array_equal(negated, -terms)
    products = [op for op in ir.walk(body.main) if op.operation.name == "stablehlo.dot_general"]
    assert len(products) == 2, "the value's, and its form's"

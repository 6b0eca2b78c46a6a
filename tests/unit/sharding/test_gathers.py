"""Weights that are split where they lie: which of their uses need them whole."""

from __future__ import annotations

import re

import pytest

from mpmd import ir
from mpmd.sharding.gathers import axes_needed_whole
from mpmd.sharding.shardings import Split

X, W, Y = "tensor<8x4xf32>", "tensor<4x6xf32>", "tensor<8x6xf32>"


def split_of(text: str) -> Split:
    """`"x,y/"` is dim 0 over both axes, and dim 1 whole."""
    return tuple(tuple(filter(None, dim.split(","))) for dim in text.split("/"))


def needed(text: str, of_weight: str, axes: str = "x", **splits: str) -> set[str]:
    """Axes along which argument `%w` is needed whole, where other arguments and results of ops are split."""
    (main,) = ir.funcs(ir.parse("func.func @main" + text))
    args = dict(zip(re.findall(r"%(\w+): ", text.partition(")")[0]), main.args))
    found = {args[name]: split_of(split) for name, split in splits.items() if name in args}
    for op in ir.walk(main):
        name = op.operation.name.removeprefix("stablehlo.")
        if name in splits:
            found.update(dict.fromkeys(op.results, split_of(splits[name])))
    return set(axes_needed_whole(args["w"], split_of(of_weight), frozenset(axes.split(",")), found))


PRODUCT = (
    f"(%a: {X}, %w: {W}) -> {Y} {{ %d = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] : "
    f"({X}, {W}) -> {Y}  return %d : {Y} }}"
)


@pytest.mark.parametrize(
    ("weight", "splits", "axes", "whole"),
    [
        ("x/", {"a": "x/", "dot_general": "x/"}, "x", {"x"}),
        ("/x", {"a": "x/", "dot_general": "x/"}, "x", {"x"}),
        ("/x", {"a": "x/", "dot_general": "/x"}, "x", set()),
        ("x/", {"a": "/x"}, "x", set()),
        ("x/", {}, "x", set()),
        ("x/y", {"a": "x/", "dot_general": "x/y"}, "x", {"x"}),
        ("x,y/", {"a": "x,y/", "dot_general": "x,y/"}, "x,y", {"x", "y"}),
        ("y/", {"a": "x/", "dot_general": "x/"}, "x,y", set()),
        ("y/", {"a": "y/", "dot_general": "y/"}, "x", set()),
    ],
    ids=[
        "contracted",
        "free dim",
        "free dim of the result",
        "contracted with a dim split alike",
        "nothing else is split",
        "another axis stays",
        "two axes",
        "rows along another axis",
        "another axis",
    ],
)
def test_a_factor_of_a_product(weight, splits, axes, whole):
    assert needed(PRODUCT, weight, axes, **splits) == whole


EXPERTS = (
    "(%a: tensor<2x8x4xf32>, %w: tensor<2x4x6xf32>) -> tensor<2x8x4xf32> {{ %d = stablehlo.dot_general {0}, "
    "batching_dims = [0] x [0], contracting_dims = {1} : {2} -> {3}  return %a : tensor<2x8x4xf32> }}"
)
LEFT = EXPERTS.format("%a, %w", "[2] x [1]", "(tensor<2x8x4xf32>, tensor<2x4x6xf32>)", "tensor<2x8x6xf32>")
RIGHT = EXPERTS.format("%w, %a", "[1] x [2]", "(tensor<2x4x6xf32>, tensor<2x8x4xf32>)", "tensor<2x6x8xf32>")


@pytest.mark.parametrize("text", [LEFT, RIGHT], ids=["right factor", "left factor"])
def test_experts_that_lie_as_their_tokens_stay_split(text):
    assert needed(text, "x//", a="x//", dot_general="x//") == set()
    assert needed(text, "x//", a="/x/", dot_general="/x/" if text is LEFT else "//x") == {"x"}
    assert needed(text, "//x", a="x//", dot_general="x//") == {"x"}


def test_the_free_dim_of_a_left_factor():
    assert needed(RIGHT, "//x", a="x//", dot_general="/x/") == set()
    assert needed(RIGHT, "//x", a="/x/", dot_general="//x") == {"x"}


TABLE = """(%w: tensor<12x4xf32>, %i: tensor<8x1xi32>) -> tensor<8x4xf32> {
  %r = "stablehlo.gather"(%w, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],
    collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = array<i64: 1, 4>}> : (tensor<12x4xf32>, tensor<8x1xi32>) -> tensor<8x4xf32>
  return %r : tensor<8x4xf32> }"""


@pytest.mark.parametrize("weight", ["x/", "/x"])
def test_a_table_whose_rows_are_looked_up(weight):
    assert needed(TABLE, weight, i="x/", gather="x/") == {"x"}
    assert needed(TABLE, weight) == set()


BIAS = (
    f"(%a: {Y}, %w: tensor<6xf32>) -> {Y} {{ %b = stablehlo.broadcast_in_dim %w, dims = [1] : "
    f"(tensor<6xf32>) -> {Y}  %r = stablehlo.add %a, %b : {Y}  return %r : {Y} }}"
)


def test_a_bias():
    assert needed(BIAS, "x", a="x/", add="x/") == {"x"}
    assert needed(BIAS, "x", a="/x", add="/x") == set()
    assert needed(BIAS, "x", broadcast_in_dim="/x", add="x/") == set()


THROUGH = {
    "convert": f"%v = stablehlo.convert %w : ({W}) -> {W}",
    "transposed twice": (
        f"%u = stablehlo.transpose %w, dims = [1, 0] : ({W}) -> tensor<6x4xf32>\n"
        f"%v = stablehlo.transpose %u, dims = [1, 0] : (tensor<6x4xf32>) -> {W}"
    ),
    "reshaped": (
        f"%u = stablehlo.reshape %w : ({W}) -> tensor<1x4x2x3xf32>\n"
        f"%v = stablehlo.reshape %u : (tensor<1x4x2x3xf32>) -> {W}"
    ),
    "sliced whole": f"%v = stablehlo.slice %w [0:4, 0:6] : ({W}) -> {W}",
    "rematerialised": (
        f"%n = stablehlo.negate %a : {X}  %u, %v = stablehlo.optimization_barrier %n, %w : {X}, {W}"
    ),
}


@pytest.mark.parametrize("way", THROUGH)
@pytest.mark.parametrize("weight", ["x/", "/x"])
def test_through_what_moves_elements(way, weight):
    text = PRODUCT.replace("%d =", THROUGH[way] + "\n%d =").replace("%a, %w", "%a, %v")
    assert needed(text, weight, a="x/", dot_general="x/") == {"x"}


@pytest.mark.parametrize(
    "use",
    [
        f"%v = stablehlo.slice %w [0:2, 0:6] : ({W}) -> tensor<2x6xf32>",
        f"%v = stablehlo.tanh %w : {W}",
        "%z = stablehlo.constant dense<0.0> : tensor<f32>  %v = stablehlo.reduce(%w init: %z) applies "
        f"stablehlo.add across dimensions = [0] : ({W}, tensor<f32>) -> tensor<6xf32>",
    ],
    ids=["a part", "elements", "a sum"],
)
def test_one_use_of_what_lies_split_keeps_it_so(use):
    """A weight decay, or a norm, reads a weight as it lies: then it is not gathered for all."""
    text = PRODUCT.replace("%d =", use + "\n%d =")
    assert needed(text, "x/", a="x/", dot_general="x/") == set()


def test_residuals_do_not_decide():
    kept = (
        f"%s = stablehlo.constant dense<0.0> : {Y}  %z = stablehlo.constant dense<0> : tensor<i32>\n"
        f"%k = stablehlo.dynamic_update_slice %s, %w, %z, %z : ({Y}, {W}, tensor<i32>, tensor<i32>) -> {Y}\n"
    )
    text = PRODUCT.replace("%d =", kept + "%d =")
    assert needed(text, "x/", a="x/", dot_general="x/") == {"x"}
    assert needed(text, "x/") == set()


LOOP = """(%a: tensor<8x4xf32>, %w: tensor<3x4x4xf32>) -> tensor<8x4xf32> {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %end = stablehlo.constant dense<3> : tensor<i32>
  %l:3 = stablehlo.while(%i = %zero, %x = %a, %s = %w) :
    tensor<i32>, tensor<8x4xf32>, tensor<3x4x4xf32>
  cond {{
    %c = stablehlo.compare LT, %i, %end, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }} do {{
    %p = stablehlo.dynamic_slice %s, %i, %zero, %zero, sizes = [1, 4, 4] :
      (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
    %q = stablehlo.reshape %p : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %d = stablehlo.dot_general %x, %q, contracting_dims = [1] x [0] :
      (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    %n = stablehlo.add %i, %one : tensor<i32>
    %t = stablehlo.convert %s : (tensor<3x4x4xf32>) -> tensor<3x4x4xf32>
    stablehlo.return %n, %d, {0} : tensor<i32>, tensor<8x4xf32>, tensor<3x4x4xf32>
  }}
  return %l#1 : tensor<8x4xf32> }}"""


def test_a_stack_of_weights_that_a_loop_reads():
    text = LOOP.format("%s").replace(
        "    %t = stablehlo.convert %s : (tensor<3x4x4xf32>) -> tensor<3x4x4xf32>\n", ""
    )
    assert needed(text, "/x/", a="x/", dot_general="x/") == {"x"}
    assert needed(text, "/x/", a="/x", dot_general="x/") == {"x"}
    assert needed(text, "x//", a="x/", dot_general="x/") == set(), "one layer is not the whole stack"


def test_a_stack_that_a_loop_changes():
    assert needed(LOOP.format("%t"), "/x/", a="x/", dot_general="x/") == set()


@pytest.mark.parametrize(
    ("dims", "whole"),
    [("{}, {}", {"x"}), ('{"y"}, {}', {"x"}), ('{"x"}, {}', set()), ("{?}, {?}", set())],
    ids=["whole", "along another axis", "as it is", "undecided"],
)
def test_a_constraint_that_makes_a_weight_whole_is_a_use(dims, whole):
    text = (
        f'(%w: {W}) -> {W} {{ %c = sdy.sharding_constraint %w <mesh<["x"=2, "y"=2]>, [{dims}]> : {W} '
        f"%n = stablehlo.negate %c : {W} return %n : {W} }}"
    )
    assert needed(text, "x/") == whole

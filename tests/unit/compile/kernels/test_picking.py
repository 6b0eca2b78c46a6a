"""Sums of one element are that element: what they are replaced by, where, and that the numbers stay."""

import numpy as np
import pytest

from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.kernel_plan import ReduceNode
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.picking import with_picked_elements
from mpmd.compile.kernels.plan_builder import PlanBuilder

ROWS, WIDTH = 7, 5


def loss(how="select", dtype="s32", label="s32", width=WIDTH, beside=True, along=1):
    """The logarithm of a label's probability, and another reduction of its row."""
    b = PlanBuilder("loss", (ROWS, width), row_dims=1)
    x = b.load_dense(b.operand("x", "f32", ROWS * width))
    labels = b.load(b.operand("labels", label, ROWS), dim(0))
    zero, one = b.constant(0.0, "f32"), b.constant(2.0, "f32")
    position = b.index(dim(along), dtype)
    hit = b.apply("compare-eq", position, b.convert(labels, dtype))
    total = b.reduce_row("add", b.apply("exponential", x))
    value = b.apply("subtract", x, b.apply("log", total)) if beside else x
    chosen = {
        "select": lambda: b.apply("select", hit, value, zero),
        "negated": lambda: b.apply("negate", b.apply("select", hit, value, zero)),
        "and": lambda: b.apply("select", b.apply("and", b.apply("compare-lt", x, one), hit), value, zero),
        "in another": lambda: b.apply(
            "select", b.apply("compare-lt", x, one), b.apply("select", hit, value, zero), zero
        ),
        "one hot": lambda: b.convert(hit, "f32"),
        "otherwise": lambda: b.apply("select", hit, zero, value),
        "or": lambda: b.apply("select", b.apply("or", b.apply("compare-lt", x, one), hit), value, zero),
        "not zero": lambda: b.apply("select", hit, value, one),
        "less": lambda: b.apply("select", b.apply("compare-lt", position, labels), value, zero),
        "times": lambda: b.apply("multiply", b.apply("select", hit, value, zero), x),
    }[how]()
    b.store(b.operand("y", "f32", ROWS), dim(0), b.reduce_row("add", chosen))
    if beside:
        b.store(b.operand("total", "f32", ROWS), dim(0), total)
    return b.finish()


def sums_in(plan):
    return sum(isinstance(n, ReduceNode) for n in plan.nodes)


def results(plan):
    rng, arrays = np.random.default_rng(0), {}
    for operand in plan.operands:
        values = rng.standard_normal(operand.size) * 3
        if operand.name == "labels":
            values = np.array([0, 4, 2, -1, WIDTH, 100, 3])
        arrays[operand.name] = values.astype(NUMPY_DTYPE[operand.dtype])
    evaluate(plan, list(arrays.values()))
    return arrays["y"]


@pytest.mark.parametrize("how", ["select", "negated", "and", "in another", "one hot"])
def test_a_sum_of_one_element_is_that_element(how):
    """Of rows whose label is none of their positions it is 0."""
    plan = loss(how)
    made = with_picked_elements(plan)
    assert sums_in(made) == sums_in(plan) - 1
    np.testing.assert_array_equal(results(made), results(plan))
    assert not np.any(np.signbit(results(made)[3:6])) and not results(made)[3:6].any()


@pytest.mark.parametrize("how", ["otherwise", "or", "not zero", "less", "times"])
def test_other_sums_stay(how):
    plan = loss(how)
    assert with_picked_elements(plan) is plan


def test_positions_that_wrap_are_met_twice():
    """Position 256 is 0 in a byte."""
    plan = loss(dtype="u8", label="u8", width=300)
    assert with_picked_elements(plan) is plan
    assert sums_in(with_picked_elements(loss(dtype="s16", label="s16", width=300))) == 1


def test_a_label_of_the_columns_is_none_of_the_row():
    plan = loss(along=0)
    assert with_picked_elements(plan) is plan


def test_an_element_is_read_before_others_store_only_if_a_reduction_is_between():
    plan = loss(beside=False)
    assert sums_in(plan) == 1 and with_picked_elements(plan) is plan

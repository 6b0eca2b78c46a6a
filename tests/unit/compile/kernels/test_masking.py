"""What a causal mask says about the values behind it, and bf16 arithmetic without rounding."""

import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.masking import SMALL, Guard, triangle_of
from mpmd.compile.kernels.plan import ReduceNode
from mpmd.compile.kernels.precision import without_rounding

T = 8


def softmax(mask, filler=-1e9, bias=False):
    """The rows of attention over `[queries, keys]`; returns the plan and the number of its factor."""
    b = PlanBuilder("rows", (T, T), row_dims=1)
    scores = b.load_dense(b.operand("scores", "f32", T * T))
    if bias:
        hidden = b.apply("select", mask(b), b.constant(0.0, "f32"), b.constant(filler, "f32"))
        masked = b.apply("add", scores, hidden)
    else:
        masked = b.apply("select", mask(b), scores, b.constant(filler, "f32"))
    top = b.reduce_row("maximum", masked)
    e = b.apply("exponential", b.apply("subtract", masked, top))
    factor = b.operand("factor", "f32", T * T)
    b.store_dense(factor, b.apply("divide", e, b.reduce_row("add", e)))
    return b.finish(), factor


def compared(direction, offset=0, swapped=False):
    def mask(b):
        row, column = b.index(dim(0) + offset, "s32"), b.index(dim(1), "s32")
        return b.apply(f"compare-{direction}", *((column, row) if swapped else (row, column)))

    return mask


@pytest.mark.parametrize(
    ("mask", "offset"),
    [
        (compared("ge"), 0),
        (compared("gt"), -1),
        (compared("ge", 3), 3),
        (compared("le", swapped=True), 0),
        (compared("lt", swapped=True), -1),
        (lambda b: b.apply("not", compared("lt")(b)), 0),
    ],
    ids=["at or before", "before", "moved", "turned", "turned, before", "negated"],
)
def test_a_comparison_of_positions_is_a_triangle(mask, offset):
    plan, factor = softmax(mask)
    triangle = triangle_of(plan, frozenset({factor}))
    assert triangle is not None
    assert triangle.offset == offset
    top = next(k for k, n in enumerate(plan.nodes) if isinstance(n, ReduceNode) and n.op == "maximum")
    assert triangle.guards == (Guard(top, -1e9, SMALL),)
    assert triangle.fills == {0: 0.0}


@pytest.mark.parametrize("direction", ["eq", "ne", "le", "lt"])
def test_other_comparisons_hide_nothing_behind_a_query(direction):
    plan, factor = softmax(compared(direction))
    assert triangle_of(plan, frozenset({factor})) is None


def test_a_filler_that_is_added_is_not_known():
    """Scores plus a filler may be anything: nothing is left out."""
    plan, factor = softmax(compared("ge"), bias=True)
    assert triangle_of(plan, frozenset({factor})) is None


def test_the_share_counts_what_is_looked_at():
    plan, factor = softmax(compared("ge"))
    triangle = triangle_of(plan, frozenset({factor}))
    assert triangle.share(T, T) == (T + 1) / (2 * T)


def test_a_sum_of_what_is_hidden_is_needed():
    b = PlanBuilder("rows", (T, T), row_dims=1)
    scores = b.load_dense(b.operand("scores", "f32", T * T))
    masked = b.apply("select", compared("ge")(b), scores, b.constant(0.0, "f32"))
    factor = b.operand("factor", "f32", T * T)
    b.store_dense(factor, masked)
    b.store_dense(b.operand("sums", "f32", T), b.reduce_row("add", scores), [0])
    assert triangle_of(b.finish(), frozenset({factor})) is None


# -- precision
def chain(op):
    """round(op(round(x * y), round(x * y)))."""
    b = PlanBuilder("chain", (64,))
    x, y = (b.load_dense(b.operand(name, "bf16", 64)) for name in "xy")
    product = b.apply("multiply", x, y)
    value = b.apply(op, product, b.apply("add", product, x))
    b.store_dense(b.operand("z", b.dtype(value), 64), value)
    return b.finish()


def run(plan, *arrays):
    result = np.zeros(64, arrays[0].dtype if plan.operands[-1].dtype == "bf16" else bool)
    evaluate(plan, [*arrays, result])
    return result


def test_inner_values_are_not_rounded():
    rng = np.random.default_rng(0)
    x, y = (rng.uniform(1, 2, 64).astype(ml_dtypes.bfloat16) for _ in range(2))
    plan = chain("subtract")
    wide = without_rounding(plan)
    exact = -x.astype(np.float32)
    assert np.array_equal(run(wide, x, y), exact.astype(ml_dtypes.bfloat16))
    assert not np.array_equal(run(plan, x, y), exact.astype(ml_dtypes.bfloat16))


def test_what_is_compared_is_rounded():
    rng = np.random.default_rng(1)
    x, y = (rng.uniform(1e-4, 1, 64).astype(ml_dtypes.bfloat16) for _ in range(2))
    plan = chain("compare-eq")
    assert np.array_equal(run(without_rounding(plan), x, y), run(plan, x, y))


def test_plans_without_bf16_stay():
    plan, _ = softmax(compared("ge"))
    assert without_rounding(plan) is plan

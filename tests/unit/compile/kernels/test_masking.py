"""What a causal mask says about the values behind it, and bf16 arithmetic without rounding."""

import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.kernel_plan import ReduceNode
from mpmd.compile.kernels.masking import SMALL, Guard, triangle_of
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.precision import without_rounding

T = 8


def softmax(mask, filler=-1e9, bias=False, size=T):
    """The rows of attention over `[queries, keys]`; returns the plan and the number of its factor."""
    b = PlanBuilder("rows", (size, size), row_dims=1)
    scores = b.load_dense(b.operand("scores", "f32", size * size))
    if bias:
        hidden = b.apply("select", mask(b), b.constant(0.0, "f32"), b.constant(filler, "f32"))
        masked = b.apply("add", scores, hidden)
    else:
        masked = b.apply("select", mask(b), scores, b.constant(filler, "f32"))
    top = b.reduce_row("maximum", masked)
    e = b.apply("exponential", b.apply("subtract", masked, top))
    factor = b.operand("factor", "f32", size * size)
    b.store_dense(factor, b.apply("divide", e, b.reduce_row("add", e)))
    return b.finish(), factor


def reductions(plan):
    """The numbers of a plan's reductions."""
    return [k for k, n in enumerate(plan.nodes) if isinstance(n, ReduceNode)]


def compared(direction, offset=0, swapped=False, dtype="s32"):
    def mask(b):
        row, column = b.index(dim(0) + offset, dtype), b.index(dim(1), dtype)
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
    top, total = reductions(plan)
    assert triangle.guards == (Guard(top, -1e9, SMALL), Guard(total, 0.0, 0.0))
    assert triangle.fills == {0: 0.0}


@pytest.mark.parametrize("direction", ["eq", "ne", "le", "lt"])
def test_other_comparisons_hide_nothing_behind_a_query(direction):
    plan, factor = softmax(compared(direction))
    assert triangle_of(plan, frozenset({factor})) is None


# -- positions as computers have them
def typed(dtype, distance=0, shift=0):
    """`query + shift >= key + shift - distance`, all in one type."""

    def mask(b):
        places = [b.index(dim(d), dtype) for d in range(2)]
        if shift:
            places = [b.apply("add", p, b.constant(shift, dtype)) for p in places]
        if distance:
            places[1] = b.apply("subtract", places[1], b.constant(distance, dtype))
        return b.apply("compare-ge", *places)

    return mask


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (typed("s8"), 128),
        (typed("u8"), 256),
        (typed("s32", shift=2**31 - 8), 8),
        (typed("u32", shift=2, distance=2), 8),
        (typed("bf16"), 257),
    ],
    ids=["s8", "u8", "s32", "u32", "bf16"],
)
def test_positions_that_fit_are_a_triangle(mask, size):
    plan, factor = softmax(mask, size=size)
    assert triangle_of(plan, frozenset({factor})) is not None


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (typed("s8"), 129),
        (typed("u8"), 257),
        (typed("s32", shift=2**31 - 8), 9),
        (typed("u32", distance=2), 8),
        (typed("bf16"), 258),
    ],
    ids=["s8", "u8", "s32", "u32", "bf16"],
)
def test_positions_that_wrap_or_are_rounded_are_no_triangle(mask, size):
    plan, factor = softmax(mask, size=size)
    assert triangle_of(plan, frozenset({factor})) is None


def test_an_offset_is_no_farther_than_there_are_queries():
    """Places are computed from it, and shall not overflow."""
    plan, factor = softmax(compared("ge", -(2**40), dtype="s64"))
    assert triangle_of(plan, frozenset({factor})).offset == -T
    for offset, hides in ((T - 2, True), (T - 1, False), (2**40, False)):
        plan, factor = softmax(compared("ge", offset, dtype="s64"))
        assert (triangle_of(plan, frozenset({factor})) is not None) == hides


# -- conditions on a row
def rows_of(finish, filler=-1e9, dtype="f32"):
    """Masked scores, of which `finish` makes the factor; the plan and the factor's number."""
    b = PlanBuilder("rows", (T, T), row_dims=1)
    scores = b.load_dense(b.operand("scores", dtype, T * T))
    made = finish(b, b.apply("select", compared("ge")(b), scores, b.constant(filler, dtype)))
    factor = b.operand("factor", b.dtype(made), T * T)
    b.store_dense(factor, made)
    return b.finish(), factor


def guards_of(finish, **options):
    plan, factor = rows_of(finish, **options)
    made = triangle_of(plan, frozenset({factor}))
    return None if made is None else {(g.filler, g.bound, g.negated) for g in made.guards}


def test_a_maximum_over_another_filler_keeps_its_guard():
    """The exponential is of a far smaller filler: that it vanishes says nothing of the maximum."""
    b = PlanBuilder("rows", (T, T), row_dims=1)
    scores, mask = b.load_dense(b.operand("scores", "f32", T * T)), compared("ge")(b)
    floor, low = (b.apply("select", mask, scores, b.constant(c, "f32")) for c in (0.0, -1e30))
    top = b.reduce_row("maximum", floor)
    factor = b.operand("factor", "f32", T * T)
    b.store_dense(factor, b.apply("exponential", b.apply("subtract", low, top)))
    made = triangle_of(b.finish(), frozenset({factor}))
    assert set(made.guards) == {Guard(top, 0.0, 0.0), Guard(top, float(np.float32(-1e30)), SMALL)}


def test_a_stronger_condition_stands_for_a_weaker_one():
    strong = Guard(3, -1e9, SMALL)
    assert strong.implies(Guard(3, -1e9, 0.0)) and strong.implies(Guard(3, -2e9, SMALL))
    for other in (Guard(3, 0.0, 0.0), Guard(4, -1e9, 0.0), Guard(3, -1e9, 0.0, negated=True)):
        assert not strong.implies(other)


def test_a_masked_zero_times_a_value_of_the_row_needs_a_finite_one():
    def weighed(b, masked):
        e = b.apply("exponential", b.apply("subtract", masked, b.reduce_row("maximum", masked)))
        return b.apply("multiply", e, b.load(b.operand("weights", "f32", T), dim(0)))

    largest = float(np.finfo(np.float32).max)
    assert guards_of(weighed) >= {(0.0, largest, False), (0.0, largest, True)}


def test_a_masked_zero_is_divided_by_a_positive_value_of_the_row():
    def by_row(b, masked):
        return b.apply("divide", masked, b.reduce_row("add", masked))

    def by_element(b, masked):
        return b.apply("divide", masked, b.load_dense(b.operand("others", "f32", T * T)))

    assert guards_of(by_row, filler=0.0) == {(0.0, 0.0, False)}
    assert guards_of(by_element, filler=0.0) is None, "what lies behind the mask may be zero"


def test_an_exponential_of_a_wider_type_is_not_zero():
    def wide(dtype):
        def finish(b, masked):
            distance = b.convert(b.apply("subtract", masked, b.reduce_row("maximum", masked)), dtype)
            return b.convert(b.apply("exponential", distance), "f32")

        return finish

    assert guards_of(wide("bf16")) is not None
    assert guards_of(wide("f64")) is None


def test_a_row_that_is_added_to_what_is_there_is_computed_once():
    b = PlanBuilder("rows", (T, T), row_dims=1)
    scores = b.load_dense(b.operand("scores", "f32", T * T))
    masked = b.apply("select", compared("ge")(b), scores, b.constant(0.0, "f32"))
    factor = b.operand("factor", "f32", T * T)
    b.store_dense(factor, masked)
    b.store(b.operand("sums", "f32", T), dim(0), b.reduce_row("add", masked), combine="add")
    assert triangle_of(b.finish(), frozenset({factor})) is None


def test_fills_have_the_type_of_what_is_stored():
    b = PlanBuilder("rows", (T, T), row_dims=1)
    scores, mask = b.load_dense(b.operand("scores", "f32", T * T)), compared("ge")(b)
    factor, big = b.operand("factor", "f32", T * T), b.constant(2**53 + 1, "s64")
    b.store_dense(factor, b.apply("select", mask, scores, b.constant(0.0, "f32")))
    b.store_dense(b.operand("mask", "pred", T * T), mask)
    numbers = b.load_dense(b.operand("numbers", "s64", T * T))
    b.store_dense(b.operand("chosen", "s64", T * T), b.apply("select", mask, numbers, big))
    made = triangle_of(b.finish(), frozenset({factor}))
    assert [(type(f), f) for f in made.fills.values()] == [(float, 0.0), (bool, False), (int, 2**53 + 1)]


def test_places_that_do_not_keep_step_are_no_triangle():
    def faster(b):
        return b.apply("compare-ge", b.index(dim(0) * 2, "s32"), b.index(dim(1), "s32"))

    plan, factor = softmax(faster)
    assert triangle_of(plan, frozenset({factor})) is None


def test_places_that_change_with_the_batch_are_no_triangle():
    b = PlanBuilder("rows", (3, T, T), batch_dims=1, row_dims=1)
    size = 3 * T * T
    scores, zero = b.load_dense(b.operand("scores", "f32", size)), b.constant(0.0, "f32")
    mask = b.apply("compare-ge", b.index(dim(0) + dim(1), "s32"), b.index(dim(2), "s32"))
    factor = b.operand("factor", "f32", size)
    b.store_dense(factor, b.apply("select", mask, scores, zero))
    assert triangle_of(b.finish(), frozenset({factor})) is None


def test_one_of_two_conditions_that_holds_does_not_decide():
    """Beyond its query a key is seen if an array says so."""

    def later(b):
        there = b.load_dense(b.operand("there", "pred", T * T))
        return b.apply("and", compared("lt")(b), there)

    plan, factor = softmax(later)
    assert triangle_of(plan, frozenset({factor})) is None


def test_what_is_mixed_or_added_up_is_zero_behind_the_mask():
    assert guards_of(lambda b, masked: masked, filler=0.0) == set()
    assert guards_of(lambda b, masked: masked, filler=1.0) is None
    total = guards_of(lambda b, masked: b.apply("multiply", b.constant(0.0, "f32"), masked), filler=1.0)
    assert total == set(), "it is the product that is mixed"

    def summed(b, masked):
        less = b.apply("subtract", masked, b.constant(1.0, "f32"))
        return b.apply("multiply", less, b.reduce_row("add", masked))

    assert guards_of(summed, filler=1.0) is None


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

"""Comparisons of positions: with fewer dims they mean the same."""

import numpy as np
import pytest

from benchmarks.direct import DirectSequence
from mpmd.compile.backends.native_cpu.emit.kernels import plan_kernels
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import dim, value
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan import IndexValue
from mpmd.compile.kernels.positions import with_coarse_comparisons
from mpmd.compile.llvm.target import host_target

COMPARISONS = ("compare-lt", "compare-le", "compare-gt", "compare-ge")
OUTER, INNER = 6, 8
DENSE = dim(0) * INNER + dim(1)


def answers(bounds, index=DENSE, dtype="s64"):
    """Every comparison of a position with every bound, as numbers."""
    b = PlanBuilder("answers", (OUTER, INNER))
    for bound in bounds:
        for op in COMPARISONS:
            asked = b.apply(op, b.index(index, dtype), b.constant(bound, dtype))
            b.store_dense(b.operand(f"{op[8:]}{bound}", "s32", OUTER * INNER), b.convert(asked, "s32"))
    return b.finish()


def dims_asked(plan):
    return {frozenset(n.index.dims()) for n in plan.nodes if isinstance(n, IndexValue)}


def results(plan):
    arrays = [np.full(o.size, -1, np.int32) for o in plan.operands]
    evaluate(plan, arrays)
    return arrays


@pytest.mark.parametrize("shift", [0, INNER, -INNER, 3])
def test_the_answers_stay_the_same(shift):
    index = dim(0) * INNER + dim(1) + shift
    plan = answers([-2 * INNER, -1, 0, 1, 5, 7, 8, 15, 16, 17, 47, 48, 80], index)
    coarse = with_coarse_comparisons(plan)
    for operand, old, fresh in zip(plan.operands, results(plan), results(coarse), strict=True):
        np.testing.assert_array_equal(fresh, old, err_msg=operand.name)
    assert (coarse != plan) == (shift % INNER == 0), "three more, and an inner dim reaches every bound"


def test_what_only_outer_dims_reach_is_asked_of_them():
    ends = [i * INNER for i in range(OUTER + 1)]
    below = PlanBuilder("below", (OUTER, INNER))
    for end in ends:
        inside = below.apply("compare-lt", below.index(dim(0) * INNER + dim(1)), below.constant(end, "s64"))
        below.store_dense(below.operand("", "s32", OUTER * INNER), below.convert(inside, "s32"))
    assert dims_asked(below.finish()) == {frozenset((0, 1))}
    assert dims_asked(with_coarse_comparisons(below.finish())) == {frozenset((0,))}


def test_what_inner_dims_reach_is_left_alone():
    for plan in (
        answers([3], dim(0) * INNER + dim(1) * 3),  # the inner dim goes beyond the outer one's step
        answers([4], dim(0) + dim(1)),
        answers([INNER], dtype="f32"),
        answers([INNER], dtype="u32"),
    ):
        assert with_coarse_comparisons(plan) is plan


def test_positions_that_are_loaded_are_left_alone():
    b = PlanBuilder("loaded", (OUTER, INNER))
    at = b.load(b.operand("at", "s32", OUTER), dim(0))
    inside = b.apply("compare-lt", b.index(value(at) * INNER + dim(1)), b.constant(INNER, "s64"))
    b.store_dense(b.operand("y", "s32", OUTER * INNER), b.convert(inside, "s32"))
    plan = b.finish()
    assert with_coarse_comparisons(plan) is plan


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s32"])
@pytest.mark.parametrize("summed", [False, True])
def test_joined_arrays(dtype, summed):
    """Three arrays side by side, and their sums over rows."""
    rows, width = 33, 40
    b = PlanBuilder("joined", (rows, 3, width), row_dims=2 if summed else 0)
    place = b.index(dim(1) * width + dim(2))
    joined = b.constant(0, dtype)
    for number in range(3):
        low, high = (b.constant(k * width, "s64") for k in (number, number + 1))
        inside = b.apply("and", b.apply("compare-ge", place, low), b.apply("compare-lt", place, high))
        index = dim(0) * width + dim(1) * width + dim(2) + -number * width
        piece = b.load(b.operand(f"x{number}", dtype, rows * width), index, where=inside)
        joined = b.apply("select", inside, piece, joined)
    size = rows * 3 * width
    b.store_dense(b.operand("y", dtype, size), joined)
    if summed:
        b.store_dense(b.operand("s", dtype, 3 * width), b.reduce_column("add", joined), (1, 2))
    plan = b.finish()
    kind, rng = NUMPY_DTYPE[dtype], np.random.default_rng(0)
    xs = [rng.integers(-3, 4, rows * width).astype(kind) for _ in range(3)]
    arrays = [*xs, np.zeros(size, kind), *([np.zeros(3 * width, kind)] if summed else [])]
    DirectSequence(plan_kernels(plan, host_target()), host_target())(*arrays)
    y = np.stack([x.reshape(rows, width) for x in xs], 1)
    np.testing.assert_array_equal(arrays[3].reshape(y.shape), y)
    if summed:
        total = y.astype(np.float64).sum(0).reshape(-1)
        np.testing.assert_array_equal(arrays[4].astype(np.float64), total)

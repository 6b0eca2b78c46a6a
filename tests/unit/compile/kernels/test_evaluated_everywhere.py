"""The evaluation of plans looks at every place, and at what a plan says that need not be computed."""

from unittest import mock

import numpy as np
import pytest

from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.evaluate_products import evaluate_attention
from mpmd.compile.kernels.index import constant, dim, value
from mpmd.compile.kernels.masking import Guard, Triangle
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.product_plans import KEYS, AttentionPlan, Mixture, View
from mpmd.errors import CompileError


@pytest.mark.parametrize("start, message", [(-1, "reads element -1 of x"), (3, "reads element 6 of x")])
def test_a_computed_place_outside_of_an_array_is_not_read(start, message):
    b = PlanBuilder("slice", (4,))
    at = value(b.load(b.operand("i", "s64", 1), constant(0)))
    b.store_dense(b.operand("y", "f32", 4), b.load(b.operand("x", "f32", 6), dim(0) + at))
    plan = b.finish()
    arrays = [np.array([start]), np.arange(6, dtype=np.float32), np.zeros(4, np.float32)]
    with pytest.raises(CompileError, match=message):
        evaluate(plan, arrays)


def test_a_guard_that_is_too_wide_reads_outside():
    b = PlanBuilder("pad", (4,))
    inside = b.apply("compare-ge", b.index(dim(0)), b.constant(1, "s64"))
    x = b.load(b.operand("x", "f32", 2), dim(0) + -1, where=inside)
    b.store_dense(b.operand("y", "f32", 4), b.apply("select", inside, x, b.constant(0.0, "f32")))
    plan = b.finish()
    with pytest.raises(CompileError, match=r"reads element 2 of x, which has 2 elements: d0 \+ -1 at 1 of 3"):
        evaluate(plan, [np.ones(2, np.float32), np.zeros(4, np.float32)])


def test_a_computed_place_outside_of_an_array_is_not_written():
    b = PlanBuilder("scatter", (4,))
    at = value(b.load_dense(b.operand("i", "s64", 4)))
    b.store(b.operand("y", "f32", 4), at, b.constant(1.0, "f32"), combine="add")
    plan = b.finish()
    with pytest.raises(CompileError, match="writes element 4 of y"):
        evaluate(plan, [np.array([0, 4, 1, 2]), np.zeros(4, np.float32)])


def floored_softmax(keys):
    """Exponentials less the largest visible score or 0, and these largest numbers; which nodes those are."""
    b = PlanBuilder("rows", (keys, keys), row_dims=1)
    x, p, m = (b.operand(n, "f32", size) for n, size in (("x", keys**2), ("p", keys**2), ("m", keys)))
    seen = b.apply("compare-ge", b.index(dim(0)), b.index(dim(1)))
    s = b.load_dense(x)
    top = b.reduce_row("maximum", b.apply("select", seen, s, b.constant(0.0, "f32")))
    far = b.apply("subtract", b.apply("select", seen, s, b.constant(-1e30, "f32")), top)
    b.store_dense(p, b.apply("exponential", far))
    b.store(m, dim(0), top)
    mixture = Mixture(KEYS, 1, p, View("f32", 0, 1, 1), View("f32", 0, 1, 1))
    return AttentionPlan("floored", (), b.finish(), (mixture,))


@pytest.mark.parametrize("guarded", [True, False])
def test_keys_that_change_a_row_are_not_skipped(guarded):
    """Row 1 sees scores below zero alone, so its largest number is a masked one."""
    plan = floored_softmax(3)
    (top,) = (store.node for store in plan.rows.stores if store.operand == 2)
    guards = (Guard(top, -1e30, -105.0), *([Guard(top, 0.0, 0.0)] if guarded else []))
    triangle = Triangle(0, guards, {0: 0.0})
    x = np.array([[1, 9, 9], [-3, -2, 9], [1, 2, 3]], np.float32)
    arrays = {
        "p0": x,
        "p2": np.zeros(3, np.float32),
        "w0": np.ones(3, np.float32),
        "c0": np.zeros(3, np.float32),
    }
    with mock.patch.object(AttentionPlan, "triangle", triangle):
        if guarded:
            evaluate_attention(plan, arrays)
            np.testing.assert_array_equal(arrays["p2"], [1, 0, 3])
        else:
            with pytest.raises(
                CompileError, match=r"sees keys up to query \+ 0 only, so that %[0-9]+ changes"
            ):
                evaluate_attention(plan, arrays)


def test_no_value_is_skipped_that_is_stored():
    plan = floored_softmax(3)
    (top,) = (store.node for store in plan.rows.stores if store.operand == 2)
    triangle = Triangle(0, (Guard(top, 0.0, 0.0),), {0: 0.5})
    x = np.ones((3, 3), np.float32)
    arrays = {
        "p0": x,
        "p2": np.zeros(3, np.float32),
        "w0": np.ones(3, np.float32),
        "c0": np.zeros(3, np.float32),
    }
    with (
        mock.patch.object(AttentionPlan, "triangle", triangle),
        pytest.raises(CompileError, match=r"changes from 0\.0 to 0\.5"),
    ):
        evaluate_attention(plan, arrays)

"""Which totals of rows have a normal reciprocal: a softmax's, whose largest exponential is 1."""

import pytest

from mpmd.compile.backends.native_gpu.triton.online import RowReductions
from mpmd.compile.kernels.plan_builder import PlanBuilder


def totals(shift):
    """Of exponentials of rows, less what `shift` makes of their maximum."""
    b = PlanBuilder("rows", (4, 16), row_dims=1)
    x = b.load_dense(b.operand("x", "f32", 64))
    top = b.reduce_row("maximum", x)
    e = b.apply("exponential", b.apply("subtract", x, shift(b, top)))
    total = b.reduce_row("add", e)
    b.store_dense(b.operand("y", "f32", 64), b.apply("divide", e, total))
    return RowReductions(b.finish()).totals()


def finite(b, top):
    return b.apply("select", b.apply("is-finite", top), top, b.constant(0.0, "f32"))


def above(b, top):
    return b.apply("select", b.apply("compare-gt", top, b.constant(1e9, "f32")), top, b.constant(92.0, "f32"))


@pytest.mark.parametrize("shift, count", [(lambda b, top: top, 1), (finite, 1), (above, 0)])
def test_a_maximum_is_replaced_only_where_it_is_not_finite(shift, count):
    assert len(totals(shift)) == count

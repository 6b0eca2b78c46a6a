"""Conditions that are known in a part of a space."""

import pytest

from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.picking import decided
from mpmd.compile.kernels.plan_builder import PlanBuilder

WIDTH = 300


def conditions(*made, dtype="s32"):
    """The conditions that functions make of a position, decided where that is below 200."""
    b = PlanBuilder("conditions", (4, WIDTH), row_dims=1)
    position = b.index(dim(1), dtype)
    numbers = [make(b, position) for make in made]
    for number in numbers:
        b.store_dense(b.operand("", "pred", 4 * WIDTH), number)
    plan = b.finish()
    found = decided(plan, {}, (4, 200))
    return [found.get(store.node) for store in plan.stores]


def compared(op, limit):
    return lambda b, position: b.apply(f"compare-{op}", position, b.constant(limit, b.dtype(position)))


@pytest.mark.parametrize(
    ("op", "below", "inside", "above"),
    [
        ("lt", False, None, True),
        ("ge", True, None, False),
        ("le", False, None, True),
        ("gt", True, None, False),
    ],
)
def test_positions_are_on_one_side_of_a_limit(op, below, inside, above):
    first, last = (0, 199) if op in ("lt", "ge") else (-1, 198)
    found = conditions(*(compared(op, n) for n in (first, first + 1, last, last + 1)))
    assert found == [below, inside, inside, above]


def test_positions_that_wrap_are_on_both_sides():
    """Position 199 is -57 in a byte with a sign, and 199 in one without."""
    assert conditions(compared("ge", 0), dtype="s8") == [None]
    assert conditions(compared("ge", 0), dtype="u8") == [True]


def test_what_is_made_of_known_conditions_is_known():
    yes, no, open_ = compared("ge", 0), compared("lt", 0), compared("lt", 7)

    def joined(op, *parts):
        return lambda b, position: b.apply(op, *(part(b, position) for part in parts))

    found = conditions(
        joined("and", yes, open_),
        joined("and", no, open_),
        joined("and", yes, yes),
        joined("or", yes, open_),
        joined("or", no, open_),
        joined("or", no, no),
        joined("not", no),
        joined("not", open_),
        joined("select", yes, no, open_),
        joined("select", no, yes, open_),
        joined("select", open_, yes, yes),
    )
    assert found == [None, False, True, True, None, False, True, None, False, None, None]

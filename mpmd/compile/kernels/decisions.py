"""Conditions that are known in a part of the iteration space: what they choose needs no choice there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.kernels.operations import INTEGERS
from mpmd.compile.kernels.plan import Apply, Constant, IndexValue, KernelPlan

_COMPARE = {
    "compare-lt": np.less,
    "compare-le": np.less_equal,
    "compare-gt": np.greater,
    "compare-ge": np.greater_equal,
}


def decided(plan: KernelPlan, known: Mapping[int, bool], extents: Sequence[int] = ()) -> dict[int, bool]:
    """The predicates of a plan that have one value in a part of its space.

    Args:
        plan: the plan.
        known: some of them.
        extents: of the part, which begins at zero in each dim; it may be empty.
    """
    found = dict(known)
    for number, node in enumerate(plan.nodes):
        if number not in found and isinstance(node, Apply | Constant) and node.dtype == "pred":
            value = _value(plan, node, found, extents)
            if value is not None:
                found[number] = value
    return found


def _value(
    plan: KernelPlan, node: Apply | Constant, found: Mapping[int, bool], extents: Sequence[int]
) -> bool | None:
    if isinstance(node, Constant):
        return bool(node.value)
    values = [found.get(a) for a in node.args]
    if node.op in ("and", "or"):
        decides = node.op == "or"
        return decides if decides in values else None if None in values else not decides
    if node.op == "not":
        return None if values[0] is None else not values[0]
    if node.op == "select":
        return None if values[0] is None else values[1 if values[0] else 2]
    return _compared(plan, node, extents) if node.op in _COMPARE and extents else None


def _compared(plan: KernelPlan, node: Apply, extents: Sequence[int]) -> bool | None:
    """A comparison of a position with a number, if all positions are on one side of it."""
    position, limit = (plan.nodes[a] for a in node.args)
    if not isinstance(position, IndexValue) or not isinstance(limit, Constant):
        return None
    if position.dtype not in INTEGERS or position.index.values():
        return None
    low, high = position.index.bounds(extents)
    smallest, largest = integer_range(position.dtype)
    if low < smallest or largest < high:
        return None  # some would wrap
    results = {bool(_COMPARE[node.op](n, limit.value)) for n in (low, high)}
    return results.pop() if len(results) == 1 else None

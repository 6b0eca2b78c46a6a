"""Recognises plans that sort, for targets with better algorithms than to compare all pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpmd.compile.kernels.index import Index, dim
from mpmd.compile.kernels.kernel_plan import (
    Apply,
    Constant,
    IndexValue,
    KernelPlan,
    Load,
    ReduceNode,
    Store,
)


@dataclass(frozen=True)
class SortedArray:
    """An array of a sort.

    Attributes:
        source: number of the operand that is read; -1 for numbers that follow from the position.
        target: number of the operand that is written.
        element: number of the node that is an element.
        other: number of the node that it is compared with; -1 if comparisons do not use it.
        place: the position of an element, given how many come before it.
        dtype: of its elements.
    """

    source: int
    target: int
    element: int
    other: int
    place: Index
    dtype: str


@dataclass(frozen=True)
class Sorting:
    """A sort.

    The plan counts for each element those that come before it:

        sum over the others of (before(other, element) or not before(element, other) and other is earlier)

    Attributes:
        along: the sorted dim; the row dim after it counts the others.
        before: number of the node that says whether the other comes before the element.
        count: number of the node that says how many elements come before the element.
        arrays: the moved arrays.
        kept: how many of each row's first elements are written.
    """

    along: int
    before: int
    count: int
    arrays: tuple[SortedArray, ...]
    kept: int


def sorting_of(plan: KernelPlan) -> Sorting | None:
    """The sort of a plan, or None if it has another form.

    Args:
        plan: the planned, not normalised, plan.
    """
    counts = [k for k, n in enumerate(plan.nodes) if isinstance(n, ReduceNode)]
    if len(counts) != 1 or plan.row_dims != 1 or plan.rank < 2:
        return None
    before = _before(plan, counts[0])
    if before is None:
        return None
    along, arrays, kept = plan.rank - 2, [], set[int]()
    for store in plan.stores:
        node = plan.nodes[store.node]
        if not isinstance(node, Load | IndexValue) or (isinstance(node, Load) and node.where >= 0):
            return None
        if store.index.values() != (counts[0],) or store.combine:
            return None
        kept.add(_kept(plan, store, counts[0]))
        moved = {d: dim(d + 1 if d == along else d) for d in range(plan.rank)}
        there = replace(node, index=node.index.substitute(moved, plan.extents))
        other = plan.nodes.index(there) if there in plan.nodes else -1
        source = node.operand if isinstance(node, Load) else -1
        arrays.append(SortedArray(source, store.operand, store.node, other, store.index, node.dtype))
    if len(kept) != 1 or -1 in kept:
        return None
    return Sorting(along, before, counts[0], tuple(arrays), kept.pop())


def _kept(plan: KernelPlan, store: Store, count: int) -> int:
    """How many elements of each row a store writes, given which node counts those before; -1 if unknown."""
    if store.where < 0:
        return plan.extents[plan.rank - 1]
    left, right = (_argument(plan, store.where, "compare-lt", k) for k in range(2))
    bound = plan.nodes[right] if right is not None else None
    return int(bound.value) if left == count and isinstance(bound, Constant) else -1


def _before(plan: KernelPlan, count: int) -> int | None:
    """The node that compares the other with the element, in a sum of those that come first."""
    total = plan.nodes[count]
    assert isinstance(total, ReduceNode)
    number = _argument(plan, total.arg, "convert", 0)
    if total.op != "add" or number is None:
        return None
    before, tie = _argument(plan, number, "or", 0), _argument(plan, number, "or", 1)
    if before is None or tie is None:
        return None
    not_after, earlier = _argument(plan, tie, "and", 0), _argument(plan, tie, "and", 1)
    if not_after is None or earlier is None or _argument(plan, not_after, "not", 0) is None:
        return None
    sides = [_argument(plan, earlier, "compare-lt", k) for k in range(2)]
    wanted = [IndexValue("s64", dim(plan.rank - 1)), IndexValue("s64", dim(plan.rank - 2))]
    if any(k is None for k in sides) or [plan.nodes[k] for k in sides if k is not None] != wanted:
        return None
    return before


def _argument(plan: KernelPlan, number: int, op: str, position: int) -> int | None:
    """An argument of a node, if that is such an operation."""
    node = plan.nodes[number]
    return node.args[position] if isinstance(node, Apply) and node.op == op else None

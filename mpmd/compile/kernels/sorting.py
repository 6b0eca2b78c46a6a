"""Plans that sort, known by their form, for targets that do better than to compare all pairs."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.plan import Apply, IndexValue, KernelPlan, Load, Reduce


@dataclass(frozen=True)
class SortedArray:
    """An array that is put in order.

    Attributes:
        source: number of the operand that is read.
        target: number of the operand that is written.
        element: number of the node that loads an element.
        other: number of the node that loads the one that it is compared with; -1 if comparisons do without.
    """

    source: int
    target: int
    element: int
    other: int


@dataclass(frozen=True)
class Sorting:
    """What a plan sorts.

    The plan counts for each element those that come before it:

        sum over the others of (before(other, element) or not before(element, other) and other is earlier)

    Attributes:
        along: the dim whose elements are put in order; the row dim after it counts the others.
        before: number of the node that says whether the other comes before the element.
        arrays: what is moved.
    """

    along: int
    before: int
    arrays: tuple[SortedArray, ...]


def sorting_of(plan: KernelPlan) -> Sorting | None:
    """What a plan sorts, or None if it has another form.

    Args:
        plan: as it was planned, not normalised.
    """
    counts = [k for k, n in enumerate(plan.nodes) if isinstance(n, Reduce)]
    if len(counts) != 1 or plan.row_dims != 1 or plan.rank < 2:
        return None
    before = _before(plan, counts[0])
    if before is None:
        return None
    along, arrays = plan.rank - 2, []
    for store in plan.stores:
        node = plan.nodes[store.node]
        if not isinstance(node, Load) or store.index.values() != (counts[0],) or store.combine:
            return None
        moved = {d: dim(d + 1 if d == along else d) for d in range(plan.rank)}
        there = Load(node.dtype, node.operand, node.index.substitute(moved, plan.extents), node.where)
        other = plan.nodes.index(there) if there in plan.nodes else -1
        arrays.append(SortedArray(node.operand, store.operand, store.node, other))
    return Sorting(along, before, tuple(arrays))


def _before(plan: KernelPlan, count: int) -> int | None:
    """The node that compares the other with the element, in a sum of those that come first."""
    total = plan.nodes[count]
    assert isinstance(total, Reduce)
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

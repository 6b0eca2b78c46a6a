"""Sums along a row with one term that is not zero: that place is read, and no other.

    sum over c of select(c == label, f(c), 0)  ->  select(0 <= label < n, f(label), 0)

So a loss needs no pass over its logits to pick the labels' logits.

Conditions that are known in a part of the iteration space: what they choose needs no choice there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.kernels.index import Index, dim, value
from mpmd.compile.kernels.kernel_plan import (
    ROW,
    Apply,
    Constant,
    IndexValue,
    KernelPlan,
    Load,
    ReduceNode,
)
from mpmd.compile.kernels.operations import INTEGERS
from mpmd.compile.kernels.plan_builder import PlanBuilder, renumbered

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
    truths = dict(known)
    for number, node in enumerate(plan.nodes):
        if number not in truths and isinstance(node, Apply | Constant) and node.dtype == "pred":
            value = _value(plan, node, truths, extents)
            if value is not None:
                truths[number] = value
    return truths


def _value(
    plan: KernelPlan, node: Apply | Constant, truths: Mapping[int, bool], extents: Sequence[int]
) -> bool | None:
    if isinstance(node, Constant):
        return bool(node.value)
    values = [truths.get(a) for a in node.args]
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


_KEEP_ZERO = ("negate", "convert")
"""Operations of one operand that give zero for zero."""


def with_picked_elements(plan: KernelPlan) -> KernelPlan:
    """The plan with elements instead of sums of one element; itself if it has none, or no other reduction.

    Another reduction comes between the reading of an element and the writing of its row.
    """
    if plan.row_dims != 1:
        return plan
    picking = _Picking(plan)
    places = {n: picking.place(plan.uses[n][0]) for n, node in enumerate(plan.nodes) if _is_sum(node)}
    places = {n: place for n, place in places.items() if place >= 0 and picking.has_value_at(n)}
    others = [n for n, node in enumerate(plan.nodes) if isinstance(node, ReduceNode) and n not in places]
    return picking.plan_with(places) if places and others else plan


def _is_sum(node: object) -> bool:
    return isinstance(node, ReduceNode) and node.op == "add" and node.axis == ROW and node.dtype != "pred"


class _Picking:
    """A plan built again; `numbers` are the new ones of its nodes."""

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.along = plan.rank - 1
        self.build = PlanBuilder(plan.name, plan.extents, batch_dims=plan.batch_dims, row_dims=1)
        for operand in plan.operands:
            self.build.operand(operand.name, operand.dtype, operand.size)
        self.numbers: dict[int, int] = {}

    def place(self, number: int) -> int:
        """The node that says where along the row a value may differ from zero; -1 if none does."""
        node = self.plan.nodes[number]
        if not isinstance(node, Apply):
            return -1
        if node.op in _KEEP_ZERO:
            return max(self.place(node.args[0]), self._equal_to(node.args[0]))
        if node.op != "select":
            return -1
        condition, chosen, other = node.args
        if not self._is_zero(other):
            return self.place(other) if self._is_zero(chosen) else -1
        label = self._equal_to(condition)
        return label if label >= 0 else self.place(chosen)

    def _equal_to(self, condition: int) -> int:
        """The value of the row that a position is compared with."""
        node = self.plan.nodes[condition]
        if not isinstance(node, Apply) or node.op not in ("and", "compare-eq"):
            return -1
        if node.op == "and":
            return max(map(self._equal_to, node.args))
        for position, label in (node.args, node.args[::-1]):
            if self._is_position(position) and self.along not in self.plan.depends[label]:
                return label
        return -1

    def _is_position(self, number: int) -> bool:
        """Whether a value is the position along the row, in a type that holds all of them."""
        node = self.plan.nodes[number]
        if not isinstance(node, IndexValue) or node.index != dim(self.along) or node.dtype not in INTEGERS:
            return False
        return self.plan.extents[self.along] - 1 <= integer_range(node.dtype)[1]

    def _is_zero(self, number: int) -> bool:
        node = self.plan.nodes[number]
        return isinstance(node, Constant) and node.dtype != "pred" and node.value == 0

    def has_value_at(self, reduction: int) -> bool:
        """Whether positions of what a reduction reads follow from one along the row."""
        reached, waiting = set[int](), list(self.plan.uses[reduction])
        while waiting:
            number = waiting.pop()
            node = self.plan.nodes[number]
            if number in reached or self.along not in self.plan.depends[number]:
                continue
            reached.add(number)
            waiting += self.plan.uses[number]
            if isinstance(node, Load | IndexValue) and not node.index.is_linear_in(self.along):
                return False
        return True

    def plan_with(self, places: dict[int, int]) -> KernelPlan:
        """The plan without some sums; `places` are the nodes that say where their term is."""
        build, plan = self.build, self.plan
        for number, node in enumerate(plan.nodes):
            if number in places:
                assert isinstance(node, ReduceNode)
                self.numbers[number] = self._picked(node, value(self.numbers[places[number]]))
            else:
                self.numbers[number] = build.node(renumbered(node, self.numbers))
        for store in plan.stores:
            where = self.numbers[store.where] if store.where >= 0 else -1
            index = store.index.renumber(self.numbers)
            build.store(store.operand, index, self.numbers[store.node], combine=store.combine, where=where)
        return build.finish()

    def _picked(self, node: ReduceNode, at: Index) -> int:
        build = self.build
        bounds = [build.constant(n, "s64") for n in (0, self.plan.extents[self.along])]
        position = build.index(at)
        inside = [build.apply(f"compare-{op}", position, bound) for op, bound in zip(("ge", "lt"), bounds)]
        there = build.apply("and", *inside)
        zero = build.constant(0 if node.dtype in INTEGERS else 0.0, node.dtype)
        element = build.apply("select", there, self._at(node.arg, at, there, {}), zero)
        return build.apply("add", element, zero)  # as a sum, it is not -0

    def _at(self, number: int, at: Index, there: int, known: dict[int, int]) -> int:
        """A value at a position along the row, if it exists."""
        if self.along not in self.plan.depends[number]:
            return self.numbers[number]
        if number not in known:
            node, build = self.plan.nodes[number], self.build
            numbers = {k: self._at(k, at, there, known) for k in self.plan.uses[number]}
            if isinstance(node, Load | IndexValue):
                index = node.index.renumber(numbers).substitute({self.along: at}, self.plan.extents)
                if isinstance(node, IndexValue):
                    known[number] = build.index(index, node.dtype)
                else:
                    guarded = [there] if node.where < 0 else [there, numbers[node.where]]
                    where = build.apply("and", *guarded) if len(guarded) == 2 else there
                    known[number] = build.load(node.operand, index, where=where)
            else:
                known[number] = build.node(renumbered(node, numbers))
        return known[number]

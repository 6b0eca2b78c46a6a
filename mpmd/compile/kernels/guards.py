"""Guards of loads: whether an element that is not read is needed.

A guarded load is zero where its guard is false, which is not an element of its array.  Its users must not
need it there: a `select` takes its other side, a store has the same guard.  A reduction over a dim of the
guard needs all elements, wherever its result is needed.

The conditions under which each node is needed are found from the stores backwards.  They are boxes: for each
index expression the ranges of its value, for each other predicate whether it is true.  What a box cannot say
is left out, so that a node may seem to be needed where it is not, and never the reverse.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator

import numpy as np

from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.kernel_plan import (
    ROW,
    Apply,
    Constant,
    IndexValue,
    KernelPlan,
    Load,
    ReduceNode,
    arguments,
)
from mpmd.compile.kernels.operations import INTEGERS, NUMPY_DTYPE

Box = dict[Hashable, int]
"""Index expression without its constant, or number of a predicate → the ranges of its value, as bits."""

_TRUE = 0b10


def guard_problems(plan: KernelPlan) -> list[str]:
    """Loads that are needed where their guard is false."""
    if not any(isinstance(n, Load) and n.where >= 0 for n in plan.nodes):
        return []
    conditions = _Conditions(plan)
    needed = conditions.needed()
    problems = []
    for number, node in enumerate(plan.nodes):
        box = needed[number]
        if not isinstance(node, Load) or node.where < 0 or box is None:
            continue
        if not conditions.implies(box, node.where):
            name = plan.operands[node.operand].name
            problems.append(f"%{number} of {name} is needed where its guard %{node.where} is false")
    return problems


class _Conditions:
    """The predicates of a plan as boxes."""

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        limits: dict[Index, set[int]] = {}
        for node in plan.nodes:
            bounds = self._comparison(node) if isinstance(node, Apply) else None
            if bounds:
                limits.setdefault(bounds[0], set()).add(bounds[1])
        self._limits = {variable: sorted(bounds) for variable, bounds in limits.items()}
        self._possible: dict[Hashable, int] = {
            variable: self._possible_ranges(variable) for variable in limits
        }

    def needed(self) -> list[Box | None]:
        """For each node the conditions under which a store needs it; None if none does."""
        plan = self.plan
        needed: list[Box | None] = [None] * len(plan.nodes)

        def need(number: int, box: Box) -> None:
            before = needed[number]
            if before is None:
                needed[number] = box
            else:
                needed[number] = {v: before[v] | ranges for v, ranges in box.items() if v in before}

        for store in plan.stores:
            box = self.where(store.where) if store.where >= 0 else {}
            for number in (store.node, *store.index.values()):
                need(number, box)
            if store.where >= 0:
                need(store.where, {})
        for number in reversed(range(len(plan.nodes))):
            node, now = plan.nodes[number], needed[number]
            if now is None:
                continue
            if isinstance(node, Apply) and node.op == "select":
                condition, chosen, other = node.args
                need(condition, now)
                need(chosen, _both(now, self.where(condition)))
                need(other, _both(now, self.where_not(condition)))
                continue
            if isinstance(node, ReduceNode):
                gone = frozenset(plan.row if node.axis == ROW else plan.outer)
                now = {v: ranges for v, ranges in now.items() if not self._dims(v) & gone}
            for argument in arguments(node):
                need(argument, now)
        return needed

    def implies(self, box: Box, number: int) -> bool:
        """Whether a predicate is true in a whole box."""
        guard = self.where(number)
        return not any(
            box.get(variable, -1) & ~ranges & self._possible.get(variable, -1)
            for variable, ranges in guard.items()
        )

    def where(self, number: int) -> Box:
        """Where a predicate is true."""
        box: Box = {}
        for variable, ranges in self._terms(number):
            box[variable] = box.get(variable, -1) & ranges
        return box

    def where_not(self, number: int) -> Box:
        """Where a predicate is false, if that is a box."""
        box = self.where(number)
        return {v: ~ranges for v, ranges in box.items()} if len(box) == 1 else {}

    def _terms(self, number: int) -> Iterator[tuple[Hashable, int]]:
        node = self.plan.nodes[number]
        comparison = self._comparison(node) if isinstance(node, Apply) else None
        if comparison:
            variable, limit, above = comparison
            below = self._below(variable, limit)
            yield variable, ~below if above else below
        elif isinstance(node, Apply) and node.op == "and":
            for argument in node.args:
                yield from self._terms(argument)
        else:
            yield number, _TRUE

    def _comparison(self, node: Apply) -> tuple[Index, int, bool] | None:
        """The expression, the limit and whether it is from there on, for a position and a constant."""
        if node.op not in ("compare-ge", "compare-lt"):
            return None
        left, right = (self.plan.nodes[a] for a in node.args)
        if not (isinstance(left, IndexValue) and isinstance(right, Constant) and self._is_exact(left)):
            return None
        return Index(left.index.terms), int(right.value) - left.index.constant, node.op == "compare-ge"

    def _is_exact(self, node: IndexValue) -> bool:
        """Whether a position does not wrap in its dtype."""
        if node.dtype == "s64" or node.dtype not in INTEGERS or node.index.values():
            return node.dtype == "s64"
        limits = np.iinfo(NUMPY_DTYPE[node.dtype])
        low, high = node.index.bounds(self.plan.extents)
        return bool(limits.min <= low and high <= limits.max)

    def _below(self, variable: Index, limit: int) -> int:
        """The ranges of values below one of the limits: range k is between limits k - 1 and k."""
        return (1 << (bisect_left(self._limits[variable], limit) + 1)) - 1

    def _possible_ranges(self, variable: Index) -> int:
        """The ranges in which an expression has a value at some point."""
        if variable.values():
            return -1
        low, high = variable.bounds(self.plan.extents)
        first, last = (bisect_right(self._limits[variable], bound) for bound in (low, high))
        return (1 << (last + 1)) - (1 << first)

    def _dims(self, variable: Hashable) -> frozenset[int]:
        """The dims along which the value of a variable may change."""
        depends = self.plan.depends
        if isinstance(variable, Index):
            return variable.dims().union(*(depends[a] for a in variable.values()))
        assert isinstance(variable, int)
        return depends[variable]


def _both(a: Box, b: Box) -> Box:
    return a | {v: a.get(v, -1) & ranges for v, ranges in b.items()}

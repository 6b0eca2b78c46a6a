"""Which keys a query's row need not look at: what a causal mask says about every value behind it.

Values at masked points are followed through the plan as constants.  What is masked with a number that is very
small beside the row's maximum has the exponential zero; that it is that small is a condition on the row,
checked when the program runs, so that a row whose own scores are as small gives what the plan says.  A masked
zero times a number is taken to be zero: where the number is infinite or NaN, the plan would give NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpmd.compile.kernels.evaluate import apply
from mpmd.compile.kernels.operations import FLOATS, NUMPY_DTYPE
from mpmd.compile.kernels.plan import (
    ELEMENT,
    ROW,
    Apply,
    Constant,
    IndexValue,
    KernelPlan,
    ReduceNode,
    store_arguments,
    store_level,
)

SMALL = -105.0
"""The exponential of this, and of everything below, is zero in f32."""


@dataclass(frozen=True)
class Guard:
    """A condition on a row: `filler - value < bound`, with `negated` `filler + value < bound`.

    Attributes:
        value: number of a node of the row.
        filler: a masked element.
        bound: what the difference must be below.
        negated: whether the node is added.
    """

    value: int
    filler: float
    bound: float
    negated: bool = False


@dataclass(frozen=True)
class Triangle:
    """Keys beyond `query + offset` need not be looked at in rows that meet all guards.

    Attributes:
        offset: last key of query 0.
        guards: conditions on a row.
        fills: number of a store → what it stores at masked points.
    """

    offset: int
    guards: tuple[Guard, ...]
    fills: Mapping[int, float]

    def share(self, queries: int, keys: int) -> float:
        """The part of the scores that is looked at."""
        looked = np.clip(np.arange(queries) + self.offset + 1, 0, keys).sum()
        return float(looked) / max(1, queries * keys)

    def __str__(self) -> str:
        return f"keys up to query + {self.offset}"


def triangle_of(plan: KernelPlan, factors: frozenset[int]) -> Triangle | None:
    """The masked part of a plan over `(..., queries | keys)`, None if it has none.

    Args:
        plan: the rows.
        factors: operands whose masked elements must be zero.
    """
    if plan.row_dims != 1 or plan.rank < 2:
        return None
    masks: dict[int, dict[int, bool]] = {}  # offset → mask → its value at masked points
    for number, node in enumerate(plan.nodes):
        if isinstance(node, Apply) and node.op.startswith("compare-"):
            found = _side(plan, node)
            if found is not None:
                masks.setdefault(found[0], {})[number] = found[1]
    for offset in sorted(masks):
        following = _Following(plan, masks[offset])
        made = following.triangle(offset, factors)
        if made is not None:
            return made
    return None


def _side(plan: KernelPlan, node: Apply) -> tuple[int, bool] | None:
    """(offset, value beyond it) of a comparison of a query's number with a key's."""
    parts = [_affine(plan, a) for a in node.args]
    if any(p is None for p in parts):
        return None
    left, right = parts
    assert left is not None and right is not None
    query, key, constant = (x - y for x, y in zip(left, right))
    direction = node.op.removeprefix("compare-")
    if direction in ("lt", "le"):
        query, key, constant = -query, -key, -constant
    constant -= direction in ("gt", "lt")  # as "at least 0"
    if direction not in ("lt", "le", "gt", "ge"):
        return None
    if (query, key) == (1, -1):
        return constant, False
    if (query, key) == (-1, 1):
        return -constant - 1, True
    return None


def _affine(plan: KernelPlan, number: int) -> tuple[int, int, int] | None:
    """Factors of the query and the key, and the constant, of an integer."""
    node, rank = plan.nodes[number], plan.rank
    if isinstance(node, IndexValue):
        index = node.index
        if any(atom.kind != "dim" or atom.number < rank - 2 for atom, _ in index.terms):
            return None
        return index.factor(rank - 2), index.factor(rank - 1), index.constant
    if isinstance(node, Constant) and node.dtype not in (*FLOATS, "pred"):
        return 0, 0, int(node.value)
    if isinstance(node, Apply) and node.op in ("add", "subtract", "convert") and node.dtype in ("s32", "s64"):
        parts = [_affine(plan, a) for a in node.args]
        if any(p is None for p in parts):
            return None
        first, *others = [p for p in parts if p is not None]
        sign = -1 if node.op == "subtract" else 1
        for other in others:
            first = (first[0] + sign * other[0], first[1] + sign * other[1], first[2] + sign * other[2])
        return first
    return None


class _Following:
    """Values at masked points: a constant, `SMALL` or below under guards, or not known."""

    def __init__(self, plan: KernelPlan, masks: Mapping[int, bool]) -> None:
        self.plan = plan
        self.guards: dict[Guard, None] = {}
        self.below: dict[int, Guard] = {}  # nodes that are `SMALL` or below under a guard
        self.constants: dict[int, Any] = {}
        self.possible = True
        for number in range(len(plan.nodes)):
            if number in masks:
                self.constants[number] = np.asarray(masks[number])
            else:
                self._follow(number)

    def _follow(self, number: int) -> None:
        node = self.plan.nodes[number]
        if isinstance(node, Constant):
            self.constants[number] = np.asarray(node.value).astype(NUMPY_DTYPE[node.dtype])
        elif isinstance(node, ReduceNode):
            self._reduction(number, node)
        elif isinstance(node, Apply):
            value = self._applied(number, node)
            if value is not None:
                self.constants[number] = np.asarray(value).astype(NUMPY_DTYPE[node.dtype])

    def _reduction(self, number: int, node: ReduceNode) -> None:
        filler = self.constants.get(node.arg)
        if node.axis != ROW or self.plan.levels[node.arg] != ELEMENT or filler is None:
            self.possible = False
        elif node.op == "maximum" and node.dtype in FLOATS:
            self.guards[Guard(number, float(filler), 0.0)] = None
        else:
            self.possible &= node.op == "add" and float(filler) == 0.0

    def _applied(self, number: int, node: Apply) -> Any:
        constants, args = self.constants, node.args
        if node.op == "select":
            chosen = constants.get(args[0])
            if chosen is not None:
                return constants.get(args[1 if bool(chosen) else 2])
            both = [constants.get(a) for a in args[1:]]
            same = both[0] is not None and both[1] is not None and both[0] == both[1]
            return both[0] if same else None
        if node.op in ("and", "or") and node.dtype == "pred":
            decides = node.op == "or"
            if any(a in constants and bool(constants[a]) == decides for a in args):
                return decides
        if node.op == "exponential" and args[0] in self.below:
            self.guards[self.below[args[0]]] = None
            return 0.0
        if node.op == "convert" and args[0] in self.below and node.dtype in FLOATS:
            self.below[number] = self.below[args[0]]
            return None
        zero = [a in constants and node.dtype in FLOATS and float(constants[a]) == 0.0 for a in args]
        if (node.op == "multiply" and any(zero)) or (node.op == "divide" and zero[0]):
            return 0.0
        if all(a in constants for a in args):
            return apply(node, [constants[a] for a in args])
        if node.op in ("subtract", "add") and node.dtype in ("f32", "bf16"):
            self._distance(number, node)
        return None

    def _distance(self, number: int, node: Apply) -> None:
        """Note a masked element less the row's maximum."""
        first, second = node.args
        if node.op == "add" and second in self.constants:
            first, second = second, first
        masked = first in self.constants and self.plan.levels[first] == ELEMENT
        if masked and self.plan.levels[second] == ROW:
            filler = float(self.constants[first])
            self.below[number] = Guard(second, filler, SMALL, node.op == "add")

    def triangle(self, offset: int, factors: frozenset[int]) -> Triangle | None:
        """What follows for the whole plan."""
        fills: dict[int, float] = {}
        for number, store in enumerate(self.plan.stores):
            if store_level(self.plan, store) == ROW:
                continue
            value = self.constants.get(store.node)
            if value is None or store.combine or len(store_arguments(store)) > 1:
                return None
            fills[number] = float(value)
            if store.operand in factors and fills[number] != 0.0:
                return None
        if not self.possible or not fills:
            return None
        used = {g.value for g in self.guards if g.bound < 0}
        guards = tuple(g for g in self.guards if g.bound < 0 or g.value not in used)
        return Triangle(offset, guards, fills)

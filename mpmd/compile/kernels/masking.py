"""Keys that a query's row can skip: the consequences of a causal mask for all dependent values.

Values at masked points are followed through the plan as constants.  A value masked with a number that is very
small beside the row's maximum has the exponential zero; that it is that small is a condition on the row,
checked at run time, so that a row whose own scores are as small is computed in full.  So is a row that
multiplies a masked zero with a value of the row that is not finite, or divides it by one not above zero.

What lies behind the mask itself is not looked at: where it is infinite or NaN, a masked zero times it is zero
and not NaN.  The sign of a masked zero is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.kernels.evaluate import apply
from mpmd.compile.kernels.kernel_plan import (
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
from mpmd.compile.kernels.operations import FLOATS, INTEGERS, NUMPY_DTYPE

SMALL = -105.0
"""The exponential of this, and of everything below, is zero in f32 and bf16."""

_WIDE_EXPONENTS = ("f32", "bf16")
_FINITE = float(np.finfo(np.float32).max)
"""Magnitudes below this are finite."""


@dataclass(frozen=True)
class Guard:
    """A condition on a row: `filler - value < bound`, with `negated` `filler + value < bound`.

    Attributes:
        value: number of a node of the row.
        filler: a masked element.
        bound: upper bound of the difference.
        negated: whether the node is added.
    """

    value: int
    filler: float
    bound: float
    negated: bool = False

    def implies(self, other: Guard) -> bool:
        """Whether a row that meets this one meets another."""
        same = (self.value, self.negated) == (other.value, other.negated)
        return same and self.filler >= other.filler and self.bound <= other.bound


@dataclass(frozen=True)
class Triangle:
    """Keys beyond `query + offset` can be skipped in rows that meet all guards.

    Attributes:
        offset: last key of query 0.
        guards: conditions on a row.
        fills: number of a store → the value that it stores at masked points.
        masks: number of a comparison → its value at masked points; at others it is the opposite.
    """

    offset: int
    guards: tuple[Guard, ...]
    fills: Mapping[int, bool | int | float]
    masks: Mapping[int, bool] = field(default_factory=dict)

    def share(self, queries: int, keys: int) -> float:
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
            side = _side(plan, node)
            if side is not None:
                masks.setdefault(side[0], {})[number] = side[1]
    queries, keys = plan.extents[-2:]
    # The smallest offset first: it skips most.  Comparisons with one offset decide together.
    for offset in sorted(masks):
        if offset >= keys - 1:
            break  # every query sees every key
        following = _Following(plan, masks[offset])
        triangle = following.triangle(max(offset, -queries), factors)
        if triangle is not None:
            return triangle
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
    # Integers: x > 0 is x - 1 >= 0.
    constant -= direction in ("gt", "lt")  # as "at least 0"
    if direction not in ("lt", "le", "gt", "ge"):
        return None
    if (query, key) == (1, -1):
        return constant, False
    if (query, key) == (-1, 1):
        return -constant - 1, True
    return None


def _affine(plan: KernelPlan, number: int) -> tuple[int, int, int] | None:
    """Factors of the query and the key, and the constant, of a number that is exact in its type."""
    node, rank = plan.nodes[number], plan.rank
    terms: tuple[int, int, int] | None = None
    if isinstance(node, IndexValue):
        index = node.index
        if all(atom.kind == "dim" and atom.number >= rank - 2 for atom, _ in index.terms):
            terms = index.factor(rank - 2), index.factor(rank - 1), index.constant
    elif isinstance(node, Constant) and node.dtype in INTEGERS:
        terms = 0, 0, int(node.value)
    elif isinstance(node, Apply) and node.op in ("add", "subtract", "convert"):
        first, *others = [_affine(plan, a) for a in node.args]
        sign = -1 if node.op == "subtract" else 1
        for other in others:
            first = first and other and _sum(first, other, sign)
        terms = first
    return terms if terms is not None and _is_exact(plan, terms, node.dtype) else None


def _sum(a: tuple[int, int, int], b: tuple[int, int, int], sign: int) -> tuple[int, int, int]:
    return a[0] + sign * b[0], a[1] + sign * b[1], a[2] + sign * b[2]


def _is_exact(plan: KernelPlan, affine: tuple[int, int, int], dtype: str) -> bool:
    """Whether a type holds all values of an affine number: none wraps or is rounded."""
    query, key, constant = affine
    ends = [factor * max(0, extent - 1) for factor, extent in zip((query, key), plan.extents[-2:])]
    low, high = (constant + sum(end(0, e) for e in ends) for end in (min, max))
    if dtype in FLOATS:
        info = ml_dtypes.finfo(DTYPES[dtype].numpy)  # type: ignore[no-untyped-call]
        exact = 2 ** (info.nmant + 1)
        return -exact <= low and high <= exact
    if dtype not in INTEGERS:
        return False
    limits = np.iinfo(DTYPES[dtype].numpy)
    return int(limits.min) <= low and high <= int(limits.max)


class _Following:
    """Values at masked points: a constant, `SMALL` or below under guards, or not known."""

    def __init__(self, plan: KernelPlan, masks: Mapping[int, bool]) -> None:
        self.plan, self.masks = plan, masks
        self.guards: dict[Guard, None] = {}
        self.below: dict[int, Guard] = {}  # nodes that are `SMALL` or below under a guard
        self.constants: dict[int, Any] = {}
        self.possible = True
        # Arguments precede their users, so one pass finds every consequence.  A node that is in neither table
        # may be anything at masked points.
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
        # A row's reduction may skip masked elements if they cannot change it: zeros in a sum; in a maximum a
        # filler that is below it, which the row's guard checks.  Everything else must see all elements.
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
        # Zero only in rows that meet the guard; the others are computed in full, so that it holds everywhere
        # where elements are skipped.
        if node.op == "exponential" and args[0] in self.below:
            self.guards[self.below[args[0]]] = None
            return 0.0
        if node.op == "convert" and args[0] in self.below and node.dtype in _WIDE_EXPONENTS:
            self.below[number] = self.below[args[0]]
            return None
        if all(a in constants for a in args):
            return apply(node, [constants[a] for a in args])
        if node.op in ("multiply", "divide") and node.dtype in FLOATS:
            return self._zero(node)
        if node.op in ("subtract", "add") and node.dtype in _WIDE_EXPONENTS:
            self._distance(number, node)
        return None

    def _zero(self, node: Apply) -> float | None:
        """A masked zero times another number, or divided by one."""
        zeros = [a in self.constants and float(self.constants[a]) == 0.0 for a in node.args]
        other = node.args[zeros[0]]
        of_row = self.plan.levels[other] == ROW
        if other in self.constants or not any(zeros):
            return None
        if node.op == "divide":
            if not zeros[0] or not of_row:
                return None
            self.guards[Guard(other, 0.0, 0.0)] = None
        # Zero times infinity is NaN: both signs are bounded.  An element's factor behind the mask is not
        # looked at, as the module says.
        elif of_row:
            for negated in (False, True):
                self.guards[Guard(other, 0.0, _FINITE, negated)] = None
        return 0.0

    def _distance(self, number: int, node: Apply) -> None:
        first, second = node.args
        if node.op == "add" and second in self.constants:
            first, second = second, first
        masked = first in self.constants and self.plan.levels[first] == ELEMENT
        if masked and self.plan.levels[second] == ROW:
            filler = float(self.constants[first])
            self.below[number] = Guard(second, filler, SMALL, node.op == "add")

    def triangle(self, offset: int, factors: frozenset[int]) -> Triangle | None:
        fills: dict[int, float] = {}
        for number, store in enumerate(self.plan.stores):
            if store.combine:
                return None  # a block may be computed twice
            if store_level(self.plan, store) == ROW:
                continue
            value = self.constants.get(store.node)
            if value is None or len(store_arguments(store)) > 1:
                return None
            fills[number] = value.item()
            if store.operand in factors and fills[number] != 0.0:
                return None
        if not self.possible or not fills:
            return None
        # Guards cost a comparison per row each: those that follow from others go.
        guards = [g for g in self.guards if not any(o.implies(g) for o in self.guards if o != g)]
        return Triangle(offset, tuple(guards), fills, self.masks)

"""Semantics of sort and topk: a stable merge sort that calls the comparator on many pairs at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.elementwise import total_order_key
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value
from mpmd.compile.hlo.instruction import HloInstruction

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning


def _sort(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """Equal elements keep their order, whether or not the sort is stable."""
    axis = instruction.dimensions[0]
    rows = [np.moveaxis(v, axis, -1) for v in operands]
    flat = [r.reshape(math.prod(r.shape[:-1]), r.shape[-1]) for r in rows]
    order = _merge_sort(flat, instruction.to_apply, engine)
    made = tuple(
        np.moveaxis(np.take_along_axis(f, order, 1).reshape(r.shape), -1, axis) for f, r in zip(flat, rows)
    )
    return made if instruction.shape.is_tuple else made[0]


def _merge_sort(keys: list[Array], comparator: HloComputation, engine: Meaning) -> Array:
    """The sorting permutation of each row of `[rows, n]` keys, bottom up, all merges of a level at once."""
    rows, size = keys[0].shape
    order = np.broadcast_to(np.arange(size), (rows, size)).copy()
    if not rows or size < 2:
        return order
    line = np.arange(rows)[:, None]
    width = 1
    while width < size:
        start = np.arange(size) // (2 * width) * (2 * width)
        in_first = np.arange(size) - start < width
        other_low = np.where(in_first, np.minimum(start + width, size), start)
        other_high = np.where(in_first, np.minimum(start + 2 * width, size), np.minimum(start + width, size))
        rank = _rank(keys, order, line, other_low, other_high, in_first, comparator, engine)
        own = np.arange(size) - np.where(in_first, start, start + width)
        place = start + own + rank
        merged = np.empty_like(order)
        merged[np.broadcast_to(line, place.shape), place] = order
        order, width = merged, 2 * width
    return order


def _rank(
    keys: list[Array],
    order: Array,
    line: Array,
    low: Array,
    high: Array,
    in_first: Array,
    comparator: HloComputation,
    engine: Meaning,
) -> Array:
    """How many elements of the other run come before each element: binary search, ties to the first run."""
    begin = np.broadcast_to(low, order.shape).copy()
    end = np.broadcast_to(high, order.shape).copy()
    mine = [k[line, order] for k in keys]
    while np.any(begin < end):
        middle = (begin + end) // 2
        safe = np.minimum(middle, order.shape[1] - 1)
        theirs = [k[line, order[line, safe]] for k in keys]
        less = _before(comparator, theirs, mine, engine)
        greater = _before(comparator, mine, theirs, engine)
        precedes = np.where(in_first, less, ~greater)
        open_ = begin < end
        begin = np.where(open_ & precedes, middle + 1, begin)
        end = np.where(open_ & ~precedes, middle, end)
    return begin - low


def _before(comparator: HloComputation, a: list[Array], b: list[Array], engine: Meaning) -> Array:
    arguments = [value for pair in zip(a, b) for value in pair]
    return np.asarray(engine.apply(comparator, arguments, a[0].shape)).astype(bool)


def _topk(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """The k largest (or smallest) of the last dim, the earlier one first on a tie; NaN is largest."""
    k, largest = cast(int, instruction.attributes["k"]), cast(bool, instruction.attributes["largest"])
    return top_k(operands[0], instruction.operands[0].shape.dtype, k, largest)


def top_k(value: Array, dtype: str, k: int, largest: bool) -> tuple[Array, Array]:
    """Values and s32 positions of the k largest or smallest elements of the last dim."""
    keys = total_order_key(value, dtype)
    if largest:
        size = value.shape[-1]
        order = size - 1 - np.argsort(keys[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    else:
        order = np.argsort(keys, axis=-1, kind="stable")
    order = order[..., :k]
    return np.take_along_axis(value, order, -1), order.astype(np.int32)


RULES: dict[str, Rule] = {"sort": _sort, "topk": _topk}

"""Semantics of reductions: reduce, windows, select-and-scatter, batch normalisation.

Sums and products of floats are taken in f64 and rounded once; everything else is folded in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from mpmd.compile.hlo.attributes import Window
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.elementwise import combine
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, convert, exact, narrow, simple_opcode, widen
from mpmd.compile.hlo.instruction import HloInstruction

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning

_FOLDS: dict[str, Callable[..., Array]] = {
    "add": np.sum,
    "multiply": np.prod,
    "maximum": np.max,
    "minimum": np.min,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


def fold(opcode: str, array: Array, init: Array, axes: tuple[int, ...], dtype: str) -> Array:
    """A simple reduction of some axes."""
    size = math.prod(array.shape[a] for a in axes)
    kept = tuple(s for a, s in enumerate(array.shape) if a not in axes)
    if not size:
        return np.broadcast_to(init, kept)
    floating = DTYPES[dtype].kind in ("float", "complex")
    if dtype == "pred":
        opcode = {"add": "or", "multiply": "and", "maximum": "or", "minimum": "and"}.get(opcode, opcode)
    if opcode in ("add", "multiply") and floating:
        total = _FOLDS[opcode](exact(array, dtype), axis=axes)
        begin = exact(init, dtype)
        return narrow(total + begin if opcode == "add" else total * begin, dtype)
    wide = widen(array, dtype)
    if opcode in ("add", "multiply"):
        folded = _FOLDS[opcode](wide, axis=axes, dtype=wide.dtype)
    else:
        folded = _FOLDS[opcode](wide, axis=axes)
    return combine(opcode, np.asarray(init), narrow(folded, dtype), dtype)


def _reduce(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    count = len(operands) // 2
    values, inits = operands[:count], operands[count:]
    axes = instruction.dimensions
    computation = instruction.to_apply
    dtype = instruction.operands[0].shape.dtype
    opcode = simple_opcode(computation)
    if opcode is not None and computation.root.shape.dtype == dtype:
        return fold(opcode, values[0], inits[0], axes, dtype)
    kept = tuple(s for a, s in enumerate(values[0].shape) if a not in axes)
    steps = math.prod(values[0].shape[a] for a in axes)
    moved = [np.moveaxis(v, axes, range(len(axes))).reshape(steps, *kept) for v in values]
    types = [p.shape.dtype for p in computation.parameters]
    state: list[Array] = [
        np.broadcast_to(convert(i, o.shape.dtype, t), kept)
        for i, o, t in zip(inits, instruction.operands[count:], types)
    ]
    columns = [convert(m, o.shape.dtype, t) for m, o, t in zip(moved, instruction.operands, types[count:])]
    for position in range(len(columns[0])):
        outcome = engine.apply(computation, [*state, *(c[position] for c in columns)], kept)
        state = list(outcome) if isinstance(outcome, tuple) else [outcome]
    return tuple(state) if instruction.shape.is_tuple else state[0]


# -- windows ----------------------------------------------------------------------------------------


def _window_places(
    window: Window, offset: Sequence[int], dims: Sequence[int], out: Sequence[int]
) -> tuple[tuple[Array, ...], Array]:
    """For one element of the window, at each position: its index, and whether it is inside the array."""
    places, inside = [], np.ones((), np.bool_)
    for axis, (side, at, size, count) in enumerate(zip(window.dims, offset, dims, out)):
        spread = np.arange(count) * side.stride - side.pad_low + at * side.rhs_dilation
        index, hole = np.divmod(spread, side.lhs_dilation)
        along = [1] * len(out)
        along[axis] = count
        inside = inside & ((hole == 0) & (index >= 0) & (index < size)).reshape(along)
        places.append(np.clip(index, 0, max(size - 1, 0)).reshape(along))
    return tuple(places), np.broadcast_to(inside, tuple(out))


def _reduce_window(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """The initial value folded with the elements of each window that are inside the array."""
    count = len(operands) // 2
    values, inits = operands[:count], operands[count:]
    window, computation = instruction.window, instruction.to_apply
    shapes = instruction.shape.elements or (instruction.shape,)
    out = shapes[0].dims
    dtype = shapes[0].dtype
    opcode = simple_opcode(computation)
    wide = opcode in ("add", "multiply") and DTYPES[dtype].kind == "float"
    if wide:
        values, inits = [exact(values[0], dtype)], [exact(inits[0], dtype)]
    state: list[Array] = [np.broadcast_to(i, out) for i in inits]
    if 0 in values[0].shape:
        return tuple(state) if instruction.shape.is_tuple else narrow(state[0], dtype)
    for offset in np.ndindex(*window.sizes):
        places, inside = _window_places(window, offset, values[0].shape, out)
        if not np.any(inside):
            continue
        parts = [np.broadcast_to(v[places] if places else v, out) for v in values]
        if opcode is not None:
            outcome: Value = combine(opcode, state[0], parts[0], "f64" if wide else dtype)
        else:
            outcome = engine.apply(computation, [*state, *parts], out)
        steps = outcome if isinstance(outcome, tuple) else (outcome,)
        state = [np.where(inside, step, old) for step, old in zip(steps, state)]
    return tuple(state) if instruction.shape.is_tuple else narrow(state[0], dtype)


def _select_and_scatter(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """Each source element goes to the element of its window that `select` prefers, the first on a tie."""
    value, source, init = operands
    select, scatter = instruction.called
    window, out = instruction.window, source.shape
    best = np.zeros(out, value.dtype)
    place = np.full(out, -1, np.int64)
    for offset in np.ndindex(*window.sizes):
        places, inside = _window_places(window, offset, value.shape, out)
        part = np.broadcast_to(value[places], out)
        flat = (
            np.broadcast_to(np.ravel_multi_index(places, value.shape), out)
            if places
            else np.zeros(out, np.int64)
        )
        keep = np.asarray(engine.apply(select, [best, part], out)).astype(bool) & (place >= 0)
        take = inside & ~keep
        best, place = np.where(take, part, best), np.where(take, flat, place)
    made = np.full(value.size, init, value.dtype)
    for at, element in zip(place.reshape(-1), source.reshape(-1)):
        if at >= 0:
            made[at] = engine.apply(scatter, [np.asarray(made[at]), np.asarray(element)], ())
    return made.reshape(value.shape)


# -- batch normalisation ----------------------------------------------------------------------------


def _along(vector: Array, rank: int, axis: int) -> Array:
    return vector.reshape([-1 if a == axis else 1 for a in range(rank)])


def _norm_parts(instruction: HloInstruction, rank: int) -> tuple[float, int, tuple[int, ...]]:
    epsilon, axis = (
        cast(float, instruction.attributes["epsilon"]),
        cast(int, instruction.attributes["feature_index"]),
    )
    return epsilon, axis, tuple(a for a in range(rank) if a != axis)


def _batch_norm_training(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    dtype = instruction.operands[0].shape.dtype
    value, scale, offset = (exact(v, dtype) for v in operands)
    epsilon, axis, rest = _norm_parts(instruction, value.ndim)
    mean, variance = value.mean(axis=rest), value.var(axis=rest)
    centred = (value - _along(mean, value.ndim, axis)) / np.sqrt(_along(variance, value.ndim, axis) + epsilon)
    made = centred * _along(scale, value.ndim, axis) + _along(offset, value.ndim, axis)
    return narrow(made, dtype), narrow(mean, dtype), narrow(variance, dtype)


def _batch_norm_inference(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    dtype = instruction.shape.dtype
    value = exact(operands[0], dtype)
    epsilon, axis, _ = _norm_parts(instruction, value.ndim)
    scale, offset, mean, variance = (_along(exact(v, dtype), value.ndim, axis) for v in operands[1:])
    return narrow((value - mean) / np.sqrt(variance + epsilon) * scale + offset, dtype)


def _batch_norm_grad(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    dtype = instruction.operands[0].shape.dtype
    value, scale, mean, variance, gradient = (exact(v, dtype) for v in operands)
    epsilon, axis, rest = _norm_parts(instruction, value.ndim)
    root = 1 / np.sqrt(variance + epsilon)
    centred = (value - _along(mean, value.ndim, axis)) * _along(root, value.ndim, axis)
    count = math.prod(value.shape[a] for a in rest)
    to_offset, to_scale = gradient.sum(axis=rest), (gradient * centred).sum(axis=rest)
    spread = (_along(to_offset, value.ndim, axis) + centred * _along(to_scale, value.ndim, axis)) / count
    made = _along(scale * root, value.ndim, axis) * (gradient - spread)
    return narrow(made, dtype), narrow(to_scale, dtype), narrow(to_offset, dtype)


RULES: dict[str, Rule] = {
    "batch-norm-grad": _batch_norm_grad,
    "batch-norm-inference": _batch_norm_inference,
    "batch-norm-training": _batch_norm_training,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "select-and-scatter": _select_and_scatter,
}

"""Semantics of data movement, and of values without operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import Rule, Value, convert
from mpmd.compile.hlo.instruction import HloInstruction

if TYPE_CHECKING:
    from mpmd.compile.hlo.evaluator import Evaluator


def _constant(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return instruction.literal


def _iota(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    shape = instruction.shape
    dim = instruction.iota_dimension
    size = shape.dims[dim] if shape.dims else 1
    source = "u64" if DTYPES[shape.dtype].kind == "unsigned" else "s64"
    counted = convert(np.arange(size, dtype=np.dtype(f"{source[0].replace('s', 'i')}8")), source, shape.dtype)
    if not shape.dims:
        return counted[0:1].reshape(())
    along = [1] * shape.rank
    along[dim] = size
    return np.broadcast_to(counted.reshape(along), shape.dims)


def _broadcast(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    value, shape = operands[0], instruction.shape
    order = sorted(range(value.ndim), key=lambda d: instruction.dimensions[d])
    along = [1] * shape.rank
    for d, size in zip(instruction.dimensions, value.shape):
        along[d] = size
    return np.broadcast_to(value.transpose(order).reshape(along), shape.dims)


def _reshape(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return operands[0].reshape(instruction.shape.dims)


def _transpose(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return operands[0].transpose(instruction.dimensions)


def _reverse(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return np.flip(operands[0], instruction.dimensions)


def _concatenate(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return np.concatenate(list(operands), axis=instruction.dimensions[0])


def _pad(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    value, filler = operands
    wider = np.full(instruction.shape.dims, filler, instruction.shape.numpy_dtype)
    source, target = [], []
    for dim, size, padded in zip(instruction.padding, value.shape, instruction.shape.dims):
        step = dim.interior + 1
        places = dim.low + np.arange(size) * step
        kept = np.flatnonzero((places >= 0) & (places < padded))
        source.append(kept)
        target.append(places[kept])
    if value.ndim:
        wider[np.ix_(*target)] = value[np.ix_(*source)]
    else:
        wider[...] = value
    return wider


def _slice(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return operands[0][instruction.slice_dims.numpy()]


def _starts(indices: Sequence[Value], dims: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The start of a part of these sizes, clamped so that it is inside."""
    begins = [min(max(int(i), 0), dim - size) for i, dim, size in zip(indices, dims, sizes)]
    return tuple(slice(b, b + size) for b, size in zip(begins, sizes))


def _dynamic_slice(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    value = operands[0]
    return value[_starts(operands[1:], value.shape, instruction.slice_sizes)]


def _dynamic_update_slice(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    value, update = operands[0].copy(), operands[1]
    value[_starts(operands[2:], value.shape, update.shape)] = update
    return value


def _partition_id(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return np.asarray(engine.device % engine.partitions, np.uint32)


def _replica_id(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return np.asarray(engine.device // engine.partitions, np.uint32)


def _tuple(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return tuple(operands)


def _element(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return operands[0][instruction.tuple_index]


RULES: dict[str, Rule] = {
    "broadcast": _broadcast,
    "concatenate": _concatenate,
    "constant": _constant,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "iota": _iota,
    "pad": _pad,
    "partition-id": _partition_id,
    "replica-id": _replica_id,
    "reshape": _reshape,
    "reverse": _reverse,
    "slice": _slice,
    "transpose": _transpose,
    "get-tuple-element": _element,
    "tuple": _tuple,
}

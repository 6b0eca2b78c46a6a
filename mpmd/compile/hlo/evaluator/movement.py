"""What data movement means, and where values come from that come from nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.conversion import convert
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import HloError

if TYPE_CHECKING:
    from mpmd.compile.hlo.evaluator.engine import Evaluator


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


def physical(value: Array, shape: Shape) -> Array:
    """The elements in the order they lie in memory."""
    return value.transpose(tuple(reversed(shape.minor_to_major)))


def from_physical(flat: Array, shape: Shape) -> Array:
    """The inverse of `physical`."""
    order = tuple(reversed(shape.minor_to_major))
    return flat.reshape(shape.physical_dims).transpose(tuple(int(i) for i in np.argsort(order)))


def _bitcast(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """The same memory with another shape, layouts included."""
    source, target = instruction.operands[0].shape, instruction.shape
    if not source.is_array or not target.is_array:
        return operands[0]
    flat = np.ascontiguousarray(physical(operands[0], source)).reshape(-1)
    return from_physical(flat.view(target.numpy_dtype), target)


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
    made = np.full(instruction.shape.dims, filler, instruction.shape.numpy_dtype)
    source, target = [], []
    for dim, size, padded in zip(instruction.padding, value.shape, instruction.shape.dims):
        step = dim.interior + 1
        places = dim.low + np.arange(size) * step
        kept = np.flatnonzero((places >= 0) & (places < padded))
        source.append(kept)
        target.append(places[kept])
    if value.ndim:
        made[np.ix_(*target)] = value[np.ix_(*source)]
    else:
        made[...] = value
    return made


def _slice(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return operands[0][instruction.slice_dims.numpy()]


def _starts(indices: Sequence[Value], dims: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Where a part of these sizes lies, moved so that it lies inside."""
    begins = [min(max(int(i), 0), dim - size) for i, dim, size in zip(indices, dims, sizes)]
    return tuple(slice(b, b + size) for b, size in zip(begins, sizes))


def _dynamic_slice(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    value = operands[0]
    return value[_starts(operands[1:], value.shape, instruction.slice_sizes)]


def _dynamic_update_slice(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    value, update = operands[0].copy(), operands[1]
    value[_starts(operands[2:], value.shape, update.shape)] = update
    return value


def _dimension_size(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return np.asarray(operands[0].shape[instruction.dimensions[0]], np.int32)


def _set_dimension_size(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    value, size = operands
    if int(size) != value.shape[instruction.dimensions[0]]:
        raise HloError(
            f"{instruction.name}: arrays with run-time sizes are not supported: size {int(size)} of "
            f"{value.shape}"
        )
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
    "bitcast": _bitcast,
    "broadcast": _broadcast,
    "concatenate": _concatenate,
    "constant": _constant,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "get-dimension-size": _dimension_size,
    "iota": _iota,
    "pad": _pad,
    "partition-id": _partition_id,
    "replica-id": _replica_id,
    "reshape": _reshape,
    "reverse": _reverse,
    "set-dimension-size": _set_dimension_size,
    "slice": _slice,
    "transpose": _transpose,
    "get-tuple-element": _element,
    "tuple": _tuple,
}

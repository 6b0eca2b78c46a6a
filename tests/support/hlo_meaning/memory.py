"""Semantics of what depends on how arrays lie in memory: bitcasts, widths of types, sizes at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, narrow
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import HloError

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning


def physical(value: Array, shape: Shape) -> Array:
    """The elements in the order of memory."""
    return value.transpose(tuple(reversed(shape.minor_to_major)))


def from_physical(flat: Array, shape: Shape) -> Array:
    """The inverse of `physical`."""
    order = tuple(reversed(shape.minor_to_major))
    return flat.reshape(shape.physical_dims).transpose(tuple(int(i) for i in np.argsort(order)))


def _bitcast(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """The same memory with another shape, layouts included."""
    source, target = instruction.operands[0].shape, instruction.shape
    if not source.is_array or not target.is_array:
        return operands[0]
    flat = np.ascontiguousarray(physical(operands[0], source)).reshape(-1)
    return from_physical(flat.view(target.numpy_dtype), target)


def _bitcast_convert(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    source, target = instruction.operands[0].shape, instruction.shape
    if min(source.info.bits, target.info.bits) < 8 and source.info.bits != target.info.bits:
        return _repack(operands[0], source.info.bits, target.info.bits, target.dtype).reshape(target.dims)
    raw = np.ascontiguousarray(operands[0])
    if source.info.bits == target.info.bits:
        return raw.view(target.numpy_dtype).reshape(operands[0].shape)  # may represent many scalars
    return raw.reshape(-1).view(target.numpy_dtype).reshape(target.dims)


def _repack(array: Array, old: int, new: int, dtype: str) -> Array:
    """Between sub-byte elements, least significant first, and bytes or wider."""
    flat = array.reshape(-1)
    if old < new:
        parts = flat.view(np.uint8).astype(np.uint64).reshape(-1, new // old) & np.uint64((1 << old) - 1)
        places = np.arange(new // old, dtype=np.uint64) * np.uint64(old)
        joined = (parts << places).sum(axis=1, dtype=np.uint64)
        return joined.astype(f"u{new // 8}").view(DTYPES[dtype].numpy)
    wide = flat.view(f"u{old // 8}").astype(np.uint64)
    places = np.arange(old // new, dtype=np.uint64) * np.uint64(new)
    split = (wide[:, None] >> places) & np.uint64((1 << new) - 1)
    if DTYPES[dtype].is_integral:
        return narrow(split.astype(np.int64), dtype)
    return split.astype(np.uint8).view(DTYPES[dtype].numpy)


def _dimension_size(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    return np.asarray(operands[0].shape[instruction.dimensions[0]], np.int32)


def _whole_size(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    value, size = operands
    if int(size) != value.shape[instruction.dimensions[0]]:
        raise HloError(f"{instruction.name}: no array has a size at run time")
    return value


RULES: dict[str, Rule] = {
    "bitcast": _bitcast,
    "bitcast-convert": _bitcast_convert,
    "get-dimension-size": _dimension_size,
    "set-dimension-size": _whole_size,
}

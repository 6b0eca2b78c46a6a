"""Cases of data movement."""

from __future__ import annotations

from collections.abc import Callable

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from tests.support.random_hlo.draft import (
    ANY,
    FLOATS,
    INTEGERS,
    Case,
    Draft,
    values,
)


def movement(draft: Draft) -> Case:
    dtype, dims = draft.pick(ANY), draft.dims(1, 4)
    kind = draft.in_turn(tuple(MOVES))
    draft.name += f" {kind} {dtype}"
    value = draft.parameter(values(draft.rng, dtype, dims), dtype)
    return draft.finish(MOVES[kind](draft, value))


def _move_reshape(draft: Draft, value: HloInstruction) -> HloInstruction:
    dims = list(value.shape.dims)
    if len(dims) > 1 and draft.rng.random() < 0.6:
        at = int(draft.rng.integers(len(dims) - 1))
        dims[at : at + 2] = [dims[at] * dims[at + 1]]
    else:
        dims.insert(int(draft.rng.integers(len(dims) + 1)), 1)
    return draft.builder.add("reshape", value, shape=array(value.shape.dtype, dims))


def _move_transpose(draft: Draft, value: HloInstruction) -> HloInstruction:
    order = tuple(int(i) for i in draft.rng.permutation(value.shape.rank))
    return draft.builder.add("transpose", value, dimensions=order)


def _move_broadcast(draft: Draft, value: HloInstruction) -> HloInstruction:
    rank = value.shape.rank + int(draft.rng.integers(0, 3))
    places = sorted(int(i) for i in draft.rng.permutation(rank)[: value.shape.rank])
    dims = list(draft.dims(rank, rank))
    for place, size in zip(places, value.shape.dims):
        dims[place] = size
    return draft.builder.broadcast(value, dims, places)


def _move_concatenate(draft: Draft, value: HloInstruction) -> HloInstruction:
    dim = int(draft.rng.integers(value.shape.rank))
    parts = [value]
    for _ in range(int(draft.rng.integers(1, 3))):
        dims = list(value.shape.dims)
        dims[dim] = int(draft.rng.integers(0, 4))
        parts.append(draft.parameter(values(draft.rng, value.shape.dtype, tuple(dims)), value.shape.dtype))
    return draft.builder.concatenate(parts, dim)


def _move_pad(draft: Draft, value: HloInstruction) -> HloInstruction:
    padding = []
    for size in value.shape.dims:
        interior = int(draft.rng.integers(0, 3))
        whole = size + max(size - 1, 0) * interior
        low = int(draft.rng.integers(-min(2, whole), 4))
        high = int(draft.rng.integers(-min(2, max(whole + low, 0)), 4)) if whole + low >= 0 else 3
        padding.append(attrs.PadDim(low, high, interior))
    filler = draft.parameter(values(draft.rng, value.shape.dtype, ()), value.shape.dtype)
    return draft.builder.pad(value, filler, padding)


def _move_slice(draft: Draft, value: HloInstruction) -> HloInstruction:
    starts, limits, strides = [], [], []
    for size in value.shape.dims:
        start = int(draft.rng.integers(0, size + 1))
        starts.append(start)
        limits.append(int(draft.rng.integers(start, size + 1)))
        strides.append(int(draft.rng.integers(1, 4)))
    return draft.builder.slice(value, starts, limits, strides)


def _move_reverse(draft: Draft, value: HloInstruction) -> HloInstruction:
    dims = tuple(d for d in range(value.shape.rank) if draft.rng.random() < 0.5)
    return draft.builder.add("reverse", value, dimensions=dims)


def _starts(draft: Draft, count: int) -> list[HloInstruction]:
    dtype = draft.pick(("s32", "s64", "u32", "s8"))
    low = 0 if dtype.startswith("u") else -2
    return [
        draft.parameter(draft.rng.integers(low, 6, ()).astype(DTYPES[dtype].numpy), dtype)
        for _ in range(count)
    ]


def _move_dynamic_slice(draft: Draft, value: HloInstruction) -> HloInstruction:
    sizes = [int(draft.rng.integers(0, size + 1)) for size in value.shape.dims]
    return draft.builder.dynamic_slice(value, _starts(draft, value.shape.rank), sizes)


def _move_dynamic_update_slice(draft: Draft, value: HloInstruction) -> HloInstruction:
    sizes = tuple(int(draft.rng.integers(0, size + 1)) for size in value.shape.dims)
    update = draft.parameter(values(draft.rng, value.shape.dtype, sizes), value.shape.dtype)
    return draft.builder.dynamic_update_slice(value, update, _starts(draft, value.shape.rank))


def _move_iota(draft: Draft, value: HloInstruction) -> HloInstruction:
    dtype = draft.pick((*FLOATS, *INTEGERS))
    made = draft.builder.iota(dtype, value.shape.dims, int(draft.rng.integers(value.shape.rank)))
    return draft.builder.tuple([made, value])


MOVES: dict[str, Callable[[Draft, HloInstruction], HloInstruction]] = {
    "reshape": _move_reshape,
    "transpose": _move_transpose,
    "broadcast": _move_broadcast,
    "concatenate": _move_concatenate,
    "pad": _move_pad,
    "slice": _move_slice,
    "reverse": _move_reverse,
    "dynamic-slice": _move_dynamic_slice,
    "dynamic-update-slice": _move_dynamic_update_slice,
    "iota": _move_iota,
}

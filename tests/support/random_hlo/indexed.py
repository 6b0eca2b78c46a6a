"""Cases of gather and scatter."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from tests.support.random_hlo.draft import (
    ANY,
    FLOATS,
    INTEGERS,
    Case,
    Draft,
    small_integers,
    values,
)


def _indexing(draft: Draft) -> tuple[tuple[int, ...], list[int], list[int], list[int], tuple[int, ...]]:
    """Dims of an operand; which are indexed, batched, inserted; sizes of the slices."""
    rank = int(draft.rng.integers(1, 4))
    dims = tuple(int(n) for n in draft.rng.integers(1, 6, rank))
    order = [int(i) for i in draft.rng.permutation(rank)]
    batched = order[:1] if rank > 1 and draft.rng.random() < 0.3 else []
    indexed = [d for d in order if d not in batched and draft.rng.random() < 0.7]
    indexed = indexed or [d for d in order if d not in batched][:1]
    inserted = sorted(d for d in range(rank) if d not in batched and draft.rng.random() < 0.5)
    sizes = tuple(
        1 if d in inserted or d in batched else int(draft.rng.integers(1, dims[d] + 1)) for d in range(rank)
    )
    return dims, indexed, batched, inserted, sizes


def _indices(
    draft: Draft, dims: tuple[int, ...], indexed: list[int], batched: list[int]
) -> tuple[HloInstruction, int, tuple[int, ...], tuple[int, ...]]:
    """Indices, index_vector_dim, their batching dims, sizes of their batch dims."""
    batch = list(draft.dims(1 if batched else 0, 2, zero=False))
    places = ()
    if batched:
        at = int(draft.rng.integers(len(batch)))
        batch[at] = dims[batched[0]]
    vector = int(draft.rng.integers(len(batch) + 1))
    shape = (*batch[:vector], len(indexed), *batch[vector:])
    if batched:
        places = (at + (at >= vector),)
    if len(indexed) == 1 and draft.rng.random() < 0.3:
        shape, vector = tuple(batch), len(batch)
        places = (at,) if batched else ()
    dtype = draft.pick(("s32", "s64", "u32", "u8"))
    low = 0 if dtype.startswith("u") else -2
    value = draft.parameter(draft.rng.integers(low, 7, shape).astype(DTYPES[dtype].numpy), dtype)
    return value, vector, places, tuple(batch)


def gather(draft: Draft) -> Case:
    dtype = draft.pick(ANY)
    dims, indexed, batched, inserted, sizes = _indexing(draft)
    draft.name += f" {dtype}"
    operand = draft.parameter(values(draft.rng, dtype, dims), dtype)
    indices, vector, places, batch = _indices(draft, dims, indexed, batched)
    kept = len(dims) - len(inserted) - len(batched)
    offsets = tuple(sorted(int(i) for i in draft.rng.permutation(len(batch) + kept)[:kept]))
    numbers = attrs.GatherDims(offsets, tuple(inserted), tuple(indexed), vector, tuple(batched), places)
    return draft.finish(draft.builder.gather(operand, indices, numbers, sizes))


def scatter(draft: Draft) -> Case:
    dtype = draft.pick((*FLOATS, *INTEGERS))
    dims, indexed, batched, inserted, sizes = _indexing(draft)
    opcode = draft.pick(("add", "maximum", "minimum", "multiply", "set"))
    draft.name += f" {opcode} {dtype}"
    operand = draft.parameter(small_integers(draft.rng, dtype, dims), dtype)
    indices, vector, places, batch = _indices(draft, dims, indexed, batched)
    kept = [d for d in range(len(dims)) if d not in inserted and d not in batched]
    windows = tuple(sorted(int(i) for i in draft.rng.permutation(len(batch) + len(kept))[: len(kept)]))
    shape = [0] * (len(batch) + len(kept))
    for place, d in zip(windows, kept):
        shape[place] = sizes[d]
    for place, size in zip([p for p in range(len(shape)) if p not in windows], batch):
        shape[place] = size
    given = small_integers(draft.rng, dtype, tuple(shape))
    if opcode == "set" and windows != tuple(range(len(batch), len(shape))):
        given = np.full_like(given, 3)  # windows overlap, and which of two updates comes last is open
    updates = draft.parameter(given, dtype)
    if opcode == "set":
        body = HloBuilder.create(draft.module, "set")
        body.parameter(array(dtype))
        computation = body.build(body.parameter(array(dtype)))
    else:
        computation = scalar_computation(draft.module, opcode, dtype)
    numbers = attrs.ScatterDims(windows, tuple(inserted), tuple(indexed), vector, tuple(batched), places)
    draft.exact = opcode != "multiply"
    draft.terms = 16
    return draft.finish(
        draft.builder.add("scatter", operand, indices, updates, scatter_dims=numbers, called=(computation,))
    )

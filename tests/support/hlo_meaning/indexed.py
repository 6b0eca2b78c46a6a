"""Semantics of gather and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.evaluator.elementwise import combine
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning


def _vectors(indices: Array, dim: int) -> Array:
    """Indices as `[batch..., vector]` of 64-bit integers; too large ones stay too large."""
    vectors = np.moveaxis(indices, dim, -1) if dim < indices.ndim else indices[..., None]
    if vectors.dtype == np.uint64:
        return np.minimum(vectors, np.uint64(np.iinfo(np.int64).max)).astype(np.int64)
    return vectors.astype(np.int64)


def _batch_position(place: int, vector_dim: int) -> int:
    """The position of a dim of the indices among the batch dims."""
    return place - (place > vector_dim)


def _gather(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    value, indices = operands
    dims, sizes = instruction.gather_dims, instruction.slice_sizes
    vectors = _vectors(indices, dims.index_vector_dim)
    batch = vectors.shape[:-1]
    dropped = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    kept = [d for d in range(value.ndim) if d not in dropped]
    rank = len(batch) + len(kept)
    places: list[Array] = []
    for d in range(value.ndim):
        start = np.zeros(batch, np.int64)
        if d in dims.start_index_map:
            start = np.clip(vectors[..., dims.start_index_map.index(d)], 0, value.shape[d] - sizes[d])
        elif d in dims.operand_batching_dims:
            source = dims.start_indices_batching_dims[dims.operand_batching_dims.index(d)]
            axis = _batch_position(source, dims.index_vector_dim)
            start = np.broadcast_to(
                np.arange(batch[axis]).reshape([-1 if a == axis else 1 for a in range(len(batch))]), batch
            )
        along = [1] * len(kept)
        offset = np.zeros(along, np.int64)
        if d in kept:
            along[kept.index(d)] = sizes[d]
            offset = np.arange(sizes[d]).reshape(along)
        places.append(start.reshape((*batch, *[1] * len(kept))) + offset)
    window = tuple(sizes[d] for d in kept)
    if 0 in window or 0 in batch:
        return np.zeros(instruction.shape.dims, value.dtype)
    made = value[tuple(places)] if places else np.broadcast_to(value, batch)
    made = np.broadcast_to(made, (*batch, *window))
    order = [0] * rank
    free = iter(range(len(batch)))
    for d in range(rank):
        order[d] = len(batch) + dims.offset_dims.index(d) if d in dims.offset_dims else next(free)
    return made.transpose(order)


def _targets(
    instruction: HloInstruction, shape: tuple[int, ...], indices: Array, update: Array
) -> tuple[Array, Array]:
    """For each element of the flat update: its position in the operand, and whether its window is inside."""
    dims = instruction.scatter_dims
    vectors = _vectors(indices, dims.index_vector_dim)
    batch_dims = [d for d in range(update.ndim) if d not in dims.update_window_dims]
    dropped = (*dims.inserted_window_dims, *dims.input_batching_dims)
    kept = [d for d in range(len(shape)) if d not in dropped]
    grid = np.indices(update.shape).reshape(update.ndim, update.size)
    batch = tuple(grid[d] for d in batch_dims)
    inside = np.ones(grid.shape[1], np.bool_)
    place = np.zeros(grid.shape[1], np.int64)
    for d, size in enumerate(shape):
        start = np.zeros(grid.shape[1], np.int64)
        if d in dims.scatter_dims_to_operand_dims:
            start = vectors[(*batch, dims.scatter_dims_to_operand_dims.index(d))]
        elif d in dims.input_batching_dims:
            source = dims.scatter_indices_batching_dims[dims.input_batching_dims.index(d)]
            start = batch[_batch_position(source, dims.index_vector_dim)]
        width, offset = 1, np.zeros(grid.shape[1], np.int64)
        if d in kept:
            axis = dims.update_window_dims[kept.index(d)]
            width, offset = update.shape[axis], grid[axis]
        inside &= (start >= 0) & (start <= size - width)
        place = place * size + np.where(inside, start + offset, 0)
    return place, inside


def _scatter(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """Updates are applied in their order; those whose window leaves the operand are skipped."""
    count = len(operands) // 2
    sources, indices, updates = operands[:count], operands[count], operands[count + 1 :]
    shape = sources[0].shape
    results = [np.array(s).reshape(-1) for s in sources]
    place, inside = _targets(instruction, shape, indices, updates[0])
    chosen = np.flatnonzero(inside)
    places = place[chosen]
    flat = [u.reshape(-1)[chosen] for u in updates]
    computation = instruction.to_apply
    opcode, dtype = simple_opcode(computation), instruction.operands[0].shape.dtype
    for step in _rounds(places):
        here = places[step]
        parts = [f[step] for f in flat]
        if opcode is not None:
            results[0][here] = combine(opcode, results[0][here], parts[0], dtype)
        else:
            outcome = engine.apply(computation, [*(r[here] for r in results), *parts], here.shape)
            for result, value in zip(results, outcome if isinstance(outcome, tuple) else (outcome,)):
                result[here] = value
    made = tuple(r.reshape(shape) for r in results)
    return made if instruction.shape.is_tuple else made[0]


def _rounds(places: Array) -> list[Array]:
    """Positions of `places` in rounds without repetition: the n-th occurrence of each place in round n."""
    if not len(places):
        return []
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    begins = np.flatnonzero(first)
    nth = np.arange(len(ordered)) - np.repeat(begins, np.diff([*begins, len(ordered)]))
    by_round = np.argsort(nth, kind="stable")
    splits = np.flatnonzero(np.diff(nth[by_round])) + 1
    return [order[part] for part in np.split(by_round, splits)]


RULES: dict[str, Rule] = {"gather": _gather, "scatter": _scatter}

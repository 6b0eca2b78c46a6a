"""Shapes of gather and scatter."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import GatherDims, Ints, ScatterDims
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.hlo.shape_inference.rule import Query, Rule, check, check_dims, check_reducer, logical


def _index_dims(query: Query, indices: Shape, vector: int) -> tuple[list[int], int]:
    """Dims of the indices without the index vector's, and the length of the vector."""
    check(indices.info.is_integral, f"the indices of {query.opcode} must be integers, got {indices}")
    check(0 <= vector <= indices.rank, f"index_vector_dim {vector} does not exist in {indices}")
    batch = [size for d, size in enumerate(indices.dims) if d != vector]
    return batch, indices.dims[vector] if vector < indices.rank else 1


def gather(query: Query) -> Shape:
    """Batch dims of the indices, with the slices' dims at `offset_dims`."""
    source, indices = query.array(0), query.array(1)
    dims: GatherDims = query.attribute("gather_dims")
    sizes = query.attribute("slice_sizes")
    batch, length = _index_dims(query, indices, dims.index_vector_dim)
    check(len(sizes) == source.rank, f"slice_sizes must name the {source.rank} dims of {source}, got {sizes}")
    check(
        len(dims.start_index_map) == length,
        f"start_index_map {dims.start_index_map} must name one dim for each of the {length} indices",
    )
    for name in ("collapsed_slice_dims", "start_index_map", "operand_batching_dims"):
        check_dims(query, name, getattr(dims, name), source.rank)
    _check_batching(query, source, indices, dims.operand_batching_dims, dims.start_indices_batching_dims)
    for d, size in enumerate(sizes):
        check(0 <= size <= source.dims[d], f"slice size {size} does not fit dim {d} of {source}")
    dropped = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    for d in dropped:
        check(sizes[d] <= 1, f"collapsed dim {d} must have slice size 1, got {sizes[d]}")
    window = [size for d, size in enumerate(sizes) if d not in dropped]
    check(
        len(window) == len(dims.offset_dims),
        f"offset_dims {dims.offset_dims} must name one result dim for each of the {len(window)} kept "
        "slice dims",
    )
    rank = len(batch) + len(window)
    check_dims(query, "offset_dims", dims.offset_dims, rank)
    out = [0] * rank
    for d, size in zip(dims.offset_dims, window):
        out[d] = size
    for d, size in zip([d for d in range(rank) if d not in dims.offset_dims], batch):
        out[d] = size
    return logical(source.dtype, out)


def _check_batching(query: Query, source: Shape, indices: Shape, mine: Ints, theirs: Ints) -> None:
    """Batching dims of the array and of the indices come in pairs of one size."""
    check_dims(query, "batching dims of the indices", theirs, indices.rank)
    check(
        [source.dims[d] for d in mine] == [indices.dims[d] for d in theirs],
        f"batching dims {mine} of {source} and {theirs} of {indices} must have equal sizes",
    )


def scatter(query: Query) -> Shape:
    """The operands' shapes: one array, or a tuple."""
    count = len(query.operands) // 2
    check(
        len(query.operands) == 2 * count + 1,
        f"scatter takes operands, indices, updates; got {len(query.operands)}",
    )
    sources, updates = query.operands[:count], query.operands[count + 1 :]
    indices = query.array(count)
    dims: ScatterDims = query.attribute("scatter_dims")
    batch, length = _index_dims(query, indices, dims.index_vector_dim)
    check(
        len(dims.scatter_dims_to_operand_dims) == length,
        f"scatter_dims_to_operand_dims {dims.scatter_dims_to_operand_dims} must name one dim for each of "
        f"the {length} indices",
    )
    for name in ("inserted_window_dims", "scatter_dims_to_operand_dims", "input_batching_dims"):
        check_dims(query, name, getattr(dims, name), sources[0].rank)
    _check_batching(query, sources[0], indices, dims.input_batching_dims, dims.scatter_indices_batching_dims)
    for source, update in zip(sources, updates):
        _check_update(query, dims, source, update, batch)
    check_reducer(query, query.called[0], sources)
    return sources[0] if count == 1 else tuple_of(sources)


def _check_update(query: Query, dims: ScatterDims, source: Shape, update: Shape, batch: list[int]) -> None:
    check(source.dtype == update.dtype, f"updates of {source} must be {source.dtype}, got {update}")
    check(source.dims == query.operands[0].dims, f"operands of scatter must have equal dims, got {source}")
    window = [
        d for d in range(source.rank) if d not in (*dims.inserted_window_dims, *dims.input_batching_dims)
    ]
    check(
        len(window) == len(dims.update_window_dims),
        f"update_window_dims {dims.update_window_dims} must name one dim for each of the {len(window)} "
        "window dims",
    )
    check_dims(query, "update_window_dims", dims.update_window_dims, update.rank)
    for d, w in zip(window, dims.update_window_dims):
        check(update.dims[w] <= source.dims[d], f"update {update} is larger than dim {d} of {source}")
    rest = [update.dims[d] for d in range(update.rank) if d not in dims.update_window_dims]
    check(
        rest == batch,
        f"updates {update} must have the index dims {batch} outside {dims.update_window_dims}, got {rest}",
    )


RULES: dict[str, Rule] = {"gather": gather, "scatter": scatter}

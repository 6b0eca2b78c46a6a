"""Shapes of operations that move data, and of values without operands.

Shapes of gather and scatter.
"""

from __future__ import annotations

from mpmd.compile.hlo.attributes import GatherDims, Ints, Padding, ScatterDims, SliceDims
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.hlo.shape_inference.rule import (
    Query,
    Rule,
    check,
    check_dims,
    check_reducer,
    check_starts,
    logical,
)


def stated(query: Query) -> Shape:
    """The stated shape; the operands do not determine it."""
    return query.claim()


def iota(query: Query) -> Shape:
    claim = query.claim()
    if claim.dims:
        dim = query.attribute("iota_dimension", 0)
        check(0 <= dim < claim.rank, f"iota_dimension {dim} does not exist in {claim}")
    return claim


def counter(query: Query) -> Shape:
    """`u32[]`, the number of this device."""
    return logical("u32", ())


def broadcast(query: Query) -> Shape:
    """The stated shape; operand dim i is result dim `dimensions[i]`."""
    source, dims = query.array(0), query.attribute("dimensions")
    claim = source if query.stated is None and source.is_scalar and not dims else query.claim()
    check_dims(query, "dimensions", dims, claim.rank)
    check(
        len(dims) == source.rank,
        f"dimensions of broadcast must name one result dim per operand dim ({source.rank}), got {dims}",
    )
    for i, d in enumerate(dims):
        check(
            source.dims[i] == claim.dims[d],
            f"broadcast maps operand dim {i} of {source} to result dim {d} of {claim}: sizes differ",
        )
    return logical(source.dtype, claim.dims)


def reshape(query: Query) -> Shape:
    """The stated dims, which must hold the same number of elements."""
    source, claim = query.array(0), query.claim()
    check(source.size == claim.size, f"reshape from {source} to {claim} changes the number of elements")
    return logical(source.dtype, claim.dims)


def bitcast(query: Query) -> Shape:
    """The stated shape, which must take the same memory."""
    source, claim = query.operands[0], query.claim()
    if source.is_array and claim.is_array:
        old, new = source.size * source.info.bits, claim.size * claim.info.bits
        check(old == new, f"bitcast from {source} to {claim} changes the size from {old} to {new} bits")
    return claim


def transpose(query: Query) -> Shape:
    """Result dim i is operand dim `dimensions[i]`."""
    source, dims = query.array(0), query.attribute("dimensions")
    check(
        sorted(dims) == list(range(source.rank)),
        f"dimensions of transpose must be a permutation of the {source.rank} operand dims, got {dims}",
    )
    return logical(source.dtype, [source.dims[d] for d in dims])


def reverse(query: Query) -> Shape:
    check_dims(query, "dimensions", query.attribute("dimensions"), query.array(0).rank)
    return query.array(0)


def concatenate(query: Query) -> Shape:
    """Operands one after the other along one dim."""
    first = query.array(0)
    dims = query.attribute("dimensions")
    check(len(dims) == 1, f"concatenate takes one dim, got {dims}")
    check_dims(query, "dimensions", dims, first.rank)
    (dim,) = dims
    total = 0
    for index in range(len(query.operands)):
        shape = query.array(index)
        rest = shape.dims[:dim] + shape.dims[dim + 1 :]
        fits = shape.dtype == first.dtype and shape.rank == first.rank
        check(
            fits and rest == first.dims[:dim] + first.dims[dim + 1 :],
            f"operand {index} of concatenate must agree with {first} except in dim {dim}, got {shape}",
        )
        total += shape.dims[dim]
    return logical(first.dtype, (*first.dims[:dim], total, *first.dims[dim + 1 :]))


def pad(query: Query) -> Shape:
    """The operand's dims enlarged (or reduced) on each side and between elements."""
    source, value = query.array(0), query.array(1)
    padding: Padding = query.attribute("padding")
    check(
        value.is_scalar and value.dtype == source.dtype,
        f"the padding value of {source} must be {source.dtype}[], got {value}",
    )
    check(
        len(padding) == source.rank,
        f"padding must name the {source.rank} dims of {source}, got {len(padding)}",
    )
    check(all(p.interior >= 0 for p in padding), f"interior padding cannot be negative: {padding}")
    dims = [p.padded(size) for p, size in zip(padding, source.dims)]
    check(all(d >= 0 for d in dims), f"padding {source} leaves a negative dim: {tuple(dims)}")
    return logical(source.dtype, dims)


def slice_(query: Query) -> Shape:
    source = query.array(0)
    dims: SliceDims = query.attribute("slice")
    check(
        len(dims.starts) == source.rank,
        f"slice must name the {source.rank} dims of {source}, got {len(dims.starts)}",
    )
    for d, (start, limit, stride) in enumerate(zip(dims.starts, dims.limits, dims.strides)):
        fits = 0 <= start <= limit <= source.dims[d] and stride > 0
        check(fits, f"slice [{start}:{limit}:{stride}] does not fit dim {d} of {source}")
    return logical(source.dtype, dims.sizes)


def dynamic_slice(query: Query) -> Shape:
    """Dims `dynamic_slice_sizes`."""
    source, sizes = query.array(0), query.attribute("slice_sizes")
    check(
        len(sizes) == source.rank and len(query.operands) == source.rank + 1,
        f"dynamic-slice of {source} needs {source.rank} starts and sizes, "
        f"got {len(query.operands) - 1} and {len(sizes)}",
    )
    check_starts(query, 1)
    for d, size in enumerate(sizes):
        check(0 <= size <= source.dims[d], f"slice size {size} does not fit dim {d} of {source}")
    return logical(source.dtype, sizes)


def dynamic_update_slice(query: Query) -> Shape:
    source, update = query.array(0), query.array(1)
    check(
        update.rank == source.rank and len(query.operands) == source.rank + 2,
        f"dynamic-update-slice of {source} needs an update of its rank and {source.rank} starts, "
        f"got {update} and {len(query.operands) - 2}",
    )
    check(update.dtype == source.dtype, f"the update of {source} must be {source.dtype}, got {update}")
    check_starts(query, 2)
    for d, size in enumerate(update.dims):
        check(size <= source.dims[d], f"update {update} does not fit dim {d} of {source}")
    return source


def dimension_size(query: Query) -> Shape:
    """`s32[]`."""
    check_dims(query, "dimensions", query.attribute("dimensions"), query.array(0).rank)
    return logical("s32", ())


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


RULES: dict[str, Rule] = {
    "parameter": stated,
    "constant": stated,
    "iota": iota,
    "partition-id": counter,
    "replica-id": counter,
    "bitcast": bitcast,
    "broadcast": broadcast,
    "concatenate": concatenate,
    "dynamic-reshape": stated,
    "dynamic-slice": dynamic_slice,
    "dynamic-update-slice": dynamic_update_slice,
    "get-dimension-size": dimension_size,
    "pad": pad,
    "reshape": reshape,
    "reverse": reverse,
    "set-dimension-size": stated,
    "slice": slice_,
    "transpose": transpose,
    "gather": gather,
    "scatter": scatter,
}

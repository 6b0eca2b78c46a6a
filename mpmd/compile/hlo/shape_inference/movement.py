"""Shapes of operations that move data, and of values without operands."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import Padding, SliceDims
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.hlo.shape_inference.rule import Query, Rule, check, check_dims, check_starts, logical


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
}

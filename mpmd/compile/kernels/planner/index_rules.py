"""One rule per opcode: the positions of its operands for an element of its result."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import Index, constant, delinearized, value
from mpmd.compile.kernels.operations import NARROW, OPERATIONS
from mpmd.compile.kernels.planner.elements import (
    READS,
    RULES,
    IndexMap,
    NoPlan,
    Trace,
    position_of,
    scalar_of,
)

ELEMENTWISE = {
    name: name
    for name in OPERATIONS
    if not name.startswith("compare-") and name not in ("convert", "bitcast-convert")
}


def read_elementwise(operand: HloInstruction, user: HloInstruction, at: IndexMap) -> IndexMap:
    """The position of an operand of an elementwise operation; scalars may be used for arrays."""
    return at if operand.shape.dims == user.shape.dims else ()


def apply(trace: Trace, op: str, args: Sequence[int], dtypes: Sequence[str], dtype: str = "") -> int:
    """An operation on nodes.

    Raises:
        NoPlan: it is not defined for their element type.
    """
    operation = OPERATIONS[op]
    if dtypes[-1] not in operation.dtypes:
        raise NoPlan(f"no kernel computes {op} of {dtypes[-1]}")
    return trace.build.apply(op, *args, dtype=dtype)


def _elementwise(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    args = [t.value(o, read_elementwise(o, i, at), where) for o in i.operands]
    return apply(t, i.opcode, args, [o.shape.dtype for o in i.operands])


def _compare(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    dtype = i.operands[0].shape.dtype
    if i.attributes.get("comparison_type") == "TOTALORDER" and dtype in ("bf16", "f16", "f32", "f64"):
        raise NoPlan("no kernel compares floats in total order")
    args = [t.value(o, at, where) for o in i.operands]
    return apply(t, f"compare-{i.direction.lower()}", args, [dtype])


def _convert(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    return t.build.convert(t.value(i.operands[0], at, where), i.shape.dtype)


def _bitcast_convert(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    source = i.operands[0].shape
    if source.dims != i.shape.dims or "pred" in (source.dtype, i.shape.dtype):
        raise NoPlan(f"no kernel reinterprets {source} as {i.shape}")
    arg = t.value(i.operands[0], at, where)
    return arg if source.dtype == i.shape.dtype else t.build.apply(
        "bitcast-convert", arg, dtype=i.shape.dtype
    )  # fmt: skip


def _part(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    return t.pair(i.operands[0], at, where)[i.opcode == "imag"]


def _iota(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    index, dtype = at[i.iota_dimension], i.shape.dtype
    if dtype in ("bf16", "f16", *NARROW):
        return t.build.convert(t.build.index(index, "s32"), dtype)
    if dtype == "pred":
        raise NoPlan("no kernel counts in pred")
    return t.build.index(index, dtype)


# -- movement
def read_broadcast(i: HloInstruction, at: IndexMap, extents: Sequence[int] = ()) -> IndexMap:
    return tuple(at[d] for d in i.dimensions)


def read_reshape(i: HloInstruction, at: IndexMap, extents: Sequence[int]) -> IndexMap:
    """The position that a reshape reads: the element at the same offset in memory."""
    # Arrays are row-major, so the offset in memory is the same; extents bound it, which removes quotients.
    return delinearized(position_of(i, at), i.operands[0].shape.dims, extents)


def read_transpose(i: HloInstruction, at: IndexMap, extents: Sequence[int] = ()) -> IndexMap:
    place = [constant(0)] * len(at)
    for here, there in enumerate(i.dimensions):
        place[there] = at[here]
    return tuple(place)


def read_slice(i: HloInstruction, at: IndexMap, extents: Sequence[int] = ()) -> IndexMap:
    bounds = i.slice_dims
    return tuple(index * stride + start for index, start, stride in zip(at, bounds.starts, bounds.strides))


def read_reverse(i: HloInstruction, at: IndexMap, extents: Sequence[int] = ()) -> IndexMap:
    return tuple(
        index * -1 + (i.shape.dims[d] - 1) if d in i.dimensions else index for d, index in enumerate(at)
    )


def read_same(i: HloInstruction, at: IndexMap, extents: Sequence[int] = ()) -> IndexMap:
    """The position that a copy reads."""
    return at


def _moved(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    if i.operands[0].shape.dtype != i.shape.dtype:
        raise NoPlan("{0} changes the element type without converting", i)
    return t.value(i.operands[0], READS[i.opcode](i, at, t.extents), where)


def _pad(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    source, filler = i.operands
    filling = t.value(filler, (), where)
    if not source.shape.size:
        return filling
    place, inside = [], -1
    for index, size, pad in zip(at, source.shape.dims, i.padding):
        conditions, moved = spread(t, index + -pad.low, size, pad.interior + 1, pad.low)
        inside = t.guarded(inside, *conditions)
        place.append(moved)
    # No condition is left where the bounds show that every position is an element.
    if inside < 0:
        return t.value(source, tuple(place), where)
    kept = t.value(source, tuple(place), t.guarded(where, inside))
    return t.build.apply("select", inside, kept, filling)


def spread(t: Trace, index: Index, size: int, step: int, low: int) -> tuple[list[int], Index]:
    """The array position of an element, given its position among elements `step` apart.

    Args:
        t: the plan under construction, for conditions.
        index: the position; the first element is at 0, and it is never below `-low`.
        size: number of elements.
        step: distance from element to element.
        low: positions before the first element.

    Returns:
        The conditions under which there is an element, and its number.
    """
    conditions = [t.within(index, 0, (size - 1) * step + 1)]
    if step > 1:
        # counted from a multiple of the step, so that the dividend is never negative
        offset = -(-max(low, 0) // step) * step
        conditions.append(t.within((index + offset).modulo(step, t.extents), 0, 1))
        index = (index + offset).divided(step, t.extents) + -(offset // step)
    return conditions, index


def _concatenate(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    """The piece that a position is in: the last one that begins at it or before.

    Conditions are needed between pieces only: positions are in the array wherever `where` is true.
    """
    (along,), start, result = i.dimensions, 0, -1
    index, size, known = at[along], i.shape.dims[along], t.bounds(at[along])
    for piece in i.operands:
        end = start + piece.shape.dims[along]
        if piece.shape.size and (known is None or (known[0] < end and known[1] >= start)):
            begun = t.within(index, start or None, None)
            # The load is guarded on both sides, but the choice needs only the lower bound: later pieces are
            # chosen over earlier ones.
            inside = t.guarded(begun, t.within(index, None, end if end < size else None))
            moved = (*at[:along], index + -start, *at[along + 1 :])
            part = t.value(piece, moved, t.guarded(where, inside))
            covers = result < 0 or begun < 0
            result = part if covers else t.build.apply("select", begun, part, result)
        start = end
    if result < 0:
        raise NoPlan("a concatenation of nothing")
    return result


# -- indexed access
def clamped_start(t: Trace, start: HloInstruction, at: IndexMap, limit: int, where: int) -> Index:
    """An index at run time, clamped to [0, limit]."""
    if limit <= 0:
        return constant(0)
    if start.opcode == "constant" and start.shape.size == 1:
        return constant(min(max(int(scalar_of(start)), 0), limit))
    node, dtype = t.value(start, at, where), start.shape.dtype
    if dtype != "s64":
        # the limit may not fit into a narrow type
        node = t.build.convert(node, "u64" if dtype.startswith("u") else "s64")
        dtype = "u64" if dtype.startswith("u") else "s64"
    low, high = t.build.constant(0, dtype), t.build.constant(limit, dtype)
    return value(t.build.apply("clamp", low, node, high))


def _dynamic_slice(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    source, *starts = i.operands
    place = [
        index + clamped_start(t, start, (), full - size, where)
        for index, start, full, size in zip(at, starts, source.shape.dims, i.slice_sizes)
    ]
    return t.value(source, tuple(place), where)


def _dynamic_update_slice(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    source, update, *starts = i.operands
    if not update.shape.size:
        return t.value(source, at, where)
    inside, place = -1, []
    for index, start, full, size in zip(at, starts, source.shape.dims, update.shape.dims):
        # The start is clamped to 0.
        if size == full:
            place.append(index)
            continue
        moved = index + clamped_start(t, start, (), full - size, where) * -1
        inside = t.guarded(inside, t.within(moved, 0, size))
        place.append(moved)
    if inside < 0:
        return t.value(update, tuple(place), where)
    # Both are loads at every point; the guard keeps the one from reading outside of the update.
    changed = t.value(update, tuple(place), t.guarded(where, inside))
    return t.build.apply("select", inside, changed, t.value(source, at, where))


def _gather(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    source, indices = i.operands
    dims = i.gather_dims
    batch = [at[d] for d in range(len(at)) if d not in dims.offset_dims]
    kept = [
        d
        for d in range(source.shape.rank)
        if d not in dims.collapsed_slice_dims and d not in dims.operand_batching_dims
    ]
    place = [constant(0)] * source.shape.rank
    for d, along in zip(kept, dims.offset_dims):
        place[d] = at[along]
    for number, d in enumerate(dims.start_index_map):
        where_found = index_place(batch, number, dims.index_vector_dim, indices)
        limit = source.shape.dims[d] - i.slice_sizes[d]
        place[d] = place[d] + clamped_start(t, indices, where_found, limit, where)
    batch_dims = [d for d in range(indices.shape.rank) if d != dims.index_vector_dim]
    for d, along in zip(dims.operand_batching_dims, dims.start_indices_batching_dims):
        place[d] = batch[batch_dims.index(along)]
    return t.value(source, tuple(place), where)


def index_place(batch: Sequence[Index], number: int, vector_dim: int, indices: HloInstruction) -> IndexMap:
    """The position of component `number` of the index vector at a batch position."""
    if vector_dim == indices.shape.rank:
        return tuple(batch)
    return (*batch[:vector_dim], constant(number), *batch[vector_dim:])


READS.update(
    {
        "bitcast": read_reshape,
        "broadcast": read_broadcast,
        "copy": read_same,
        "reshape": read_reshape,
        "reverse": read_reverse,
        "slice": read_slice,
        "transpose": read_transpose,
    }
)
RULES.update(dict.fromkeys(READS, _moved))
RULES.update(dict.fromkeys(ELEMENTWISE, _elementwise))
RULES.update(
    {
        "bitcast-convert": _bitcast_convert,
        "compare": _compare,
        "concatenate": _concatenate,
        "convert": _convert,
        "dynamic-slice": _dynamic_slice,
        "dynamic-update-slice": _dynamic_update_slice,
        "gather": _gather,
        "imag": _part,
        "iota": _iota,
        "pad": _pad,
        "real": _part,
    }
)

"""Loops over a plan's dims: outer indices from a flat number, vectors with a tail along the innermost dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.builder import Index as Position
from mpmd.compile.llvm.types import Value

Body = Callable[[list[Lanes], list[Value]], list[Value]]


def unflatten(
    f: FunctionBuilder, flat: Position, dims: Sequence[int], extents: Sequence[int]
) -> dict[int, Position]:
    """The index along each dim of a number that counts through them, the last one fastest."""
    found: dict[int, Position] = {}
    for n, dim in enumerate(reversed(dims)):
        outermost = n == len(dims) - 1
        found[dim] = flat if outermost else f.irem(flat, extents[dim])
        flat = f.idiv(flat, extents[dim])
    return found


def vector_loop(
    f: FunctionBuilder,
    dim: int,
    low: Position,
    high: Position,
    extent: int,
    lanes: int,
    unroll: int,
    carried: Sequence[Value],
    body: Body,
) -> list[Value]:
    """`body` for all of `[low, high)` along a dim: unrolled vectors, single vectors, then the tail.

    `low` is a multiple of `unroll * lanes`, and so is `high` unless it is `extent`.  The body gets the
    vectors of one round and the carried values, and returns the next ones; the tail is one masked vector
    where masks are cheap, single elements elsewhere.
    """
    values = list(carried)

    def rounds(start: Position, stop: Position, count: int, width: int) -> None:
        nonlocal values
        with f.loop(start, stop, count * width, carried=values) as loop:
            parts = [Lanes(dim, f.iadd(loop.i, u * width), width) for u in range(count)]
            loop.carry(body(parts, loop.carried))
        values = loop.carried

    block = unroll * lanes
    whole = extent // block * block
    full = extent // lanes * lanes
    if whole:
        rounds(low, f.imin(high, whole), unroll, lanes)
    if full > whole:
        rounds(f.imax(low, whole), f.imin(high, full), 1, lanes)
    if extent == full:
        return values
    if not f.target.mask_registers:
        rounds(f.imax(low, full), high, 1, 1)
        return values
    # at most one round, and only in the thread that has the end of the dim
    with f.loop(f.imax(low, full), high, lanes, carried=values) as loop:
        left = f.splat(f.index(extent - full), lanes)
        mask = f.compare("slt", f.lane_numbers(lanes, "i64"), left)
        loop.carry(body([Lanes(dim, loop.i, lanes, mask)], loop.carried))
    return loop.carried


def nested(
    f: FunctionBuilder,
    dims: Sequence[int],
    extents: Sequence[int],
    carried: Sequence[Value],
    body: Callable[[dict[int, Position], list[Value]], list[Value]],
) -> list[Value]:
    """`body` for every combination of indices along some dims, carrying values through all loops."""
    if not dims:
        return body({}, list(carried))
    with f.loop(0, extents[dims[0]], carried=carried) as loop:

        def inner(indices: dict[int, Position], values: list[Value]) -> list[Value]:
            return body({dims[0]: loop.i, **indices}, values)

        loop.carry(nested(f, dims[1:], extents, loop.carried, inner))
    return loop.carried


def product(extents: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod([extents[d] for d in dims])

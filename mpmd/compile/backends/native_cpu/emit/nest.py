"""Loops over a plan's dims: outer indices from a flat number, vectors with a tail along the innermost dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant

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
    *,
    backwards: bool = False,
) -> list[Value]:
    """`body` for all of `[low, high)` along a dim: unrolled vectors, single vectors, then the tail.

    `low` is a multiple of `unroll * lanes`, and so is `high` unless it is `extent`.  The body gets the
    vectors of one round and the carried values, and returns the next ones; the tail is one masked vector
    where masks are cheap, single elements elsewhere.

    Unrolled vectors come from the last round to the first if they go `backwards`, which asks for `low` 0 and
    `high` the extent.
    """
    values = list(carried)

    def rounds(start: Position, stop: Position, count: int, width: int, *, last: int | None = None) -> None:
        """From `start` on, or from the round that begins at `last` back."""
        nonlocal values
        with f.loop(start, stop, count * width, carried=values) as loop:
            at = loop.i if last is None else f.sub(constant(last, "i64"), loop.i)
            parts = [Lanes(dim, f.iadd(at, u * width), width) for u in range(count)]
            loop.carry(body(parts, loop.carried))
        values = loop.carried

    block = unroll * lanes
    whole = extent // block * block
    full = extent // lanes * lanes
    if whole:
        rounds(low, f.imin(high, whole), unroll, lanes, last=whole - block if backwards else None)
    if full > whole:
        rounds(f.imax(low, whole), f.imin(high, full), 1, lanes)
    if extent == full:
        return values
    if not f.target.mask_registers:
        rounds(f.imax(low, full), high, 1, 1)
        return values
    # at most one round, and only for whoever has the end of the dim
    with f.loop(f.imax(low, full), high, lanes, carried=values) as loop:
        left = f.splat(f.index(extent - full), lanes)
        mask = f.compare("slt", f.lane_numbers(lanes, "i64"), left)
        loop.carry(body([Lanes(dim, loop.i, lanes, mask)], loop.carried))
    return loop.carried


@dataclass(frozen=True)
class Order:
    """Places along a dim, in memory, in an order without any pattern.

    Attributes:
        places: address of the places, `i32` each.
        count: how many.
        group: vectors from one place to the next higher one, which stay together.
    """

    places: Value
    count: Position
    group: int


def shuffled_order(f: FunctionBuilder, whole: int, lanes: int, group: int) -> Order:
    """All places of `[0, whole)` that are multiples of `group * lanes`."""
    step, count = group * lanes, whole // (group * lanes)
    places = ", ".join(f"i32 {place * step}" for place in shuffled(count))
    name = f"order_{count}_{step}"
    f.module.add_global(name, f"private unnamed_addr constant [{count} x i32] [{places}]")
    return Order(Value(f"@{name}", "ptr"), count, group)


def order_between(f: FunctionBuilder, order: Order, low: Position, high: Position) -> Order:
    """Those places of a constant order that lie in `[low, high)`, listed on the stack."""
    assert isinstance(order.count, int)
    places = f.stack("i32", order.count)
    with f.loop(0, order.count, carried=[constant(0, "i64")]) as loop:
        place = f.load(order.places, "i32", loop.i)
        f.store(place, places, loop.carried[0])
        at = f.cast("zext", place, "i64")
        above, below = (f.compare("sge", at, f.index(low)), f.compare("slt", at, f.index(high)))
        kept = f.cast("zext", f.and_(above, below), "i64")
        loop.carry([f.add(loop.carried[0], kept)])
    return Order(places, loop.carried[0], order.group)


def ordered_loop(
    f: FunctionBuilder, dim: int, order: Order, lanes: int, unroll: int, body: Callable[[list[Lanes]], None]
) -> None:
    """`body` for all places of an order, several groups of vectors in each round.

    Args:
        f: the function.
        dim: the dim.
        order: the places; how many is a multiple of the groups of a round.
        lanes: of a vector.
        unroll: vectors of a round, a multiple of a group's.
        body: writes the code for the groups of a round, one after the other.
    """
    with f.loop(0, order.count, unroll // order.group) as loop:
        parts = []
        for number in range(unroll // order.group):
            place = f.cast("zext", f.load(order.places, "i32", f.iadd(loop.i, number)), "i64")
            parts += [Lanes(dim, f.iadd(place, u * lanes), lanes) for u in range(order.group)]
        body(parts)


def shuffled(count: int) -> list[int]:
    """The numbers below `count` in an order that looks random and is always the same (Fisher and Yates)."""
    order, state = list(range(count)), 12345
    for last in range(count - 1, 0, -1):
        state = (state * 1103515245 + 12345) % (1 << 32)
        other = (state >> 16) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order


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
    """Points along some dims."""
    return math.prod([extents[d] for d in dims])

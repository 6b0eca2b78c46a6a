"""Positions in arrays, and the loops that step through them.

An index of a plan becomes a number, or a vector of one number per lane.  Outer indices come from a flat
number; along the innermost dim there are vectors with a tail.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.storage import BYTES, REGISTER
from mpmd.compile.kernels.index import Atom, Index
from mpmd.compile.kernels.kernel_plan import IndexValue, KernelPlan
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value, constant, element_of, lanes_of, vector, vector_constant


@dataclass(frozen=True)
class Lanes:
    """The dim that runs along the lanes of vectors.

    Attributes:
        dim: its number.
        start: index of the first lane.
        count: lanes; 1 makes everything scalar.
        mask: lanes inside of the iteration space, or None if all are.
    """

    dim: int
    start: Position
    count: int
    mask: Value | None = None


class Places(ABC):
    """The half of a `Scope` that turns indices into numbers.

    Attributes:
        f: the function.
        plan: the plan.
        dims: index of each known dim.
        lanes: the vector dim, if it is known.
    """

    f: FunctionBuilder
    plan: KernelPlan
    dims: dict[int, Position]
    lanes: Lanes | None

    @abstractmethod
    def value(self, number: int) -> Value:
        """A node's value: a scalar, or a vector if it changes along the lanes."""

    def position(self, index: Index) -> Position:
        """An index that does not change along the lanes, as one number."""
        return self._position(index, self.dims)

    def first(self, index: Index) -> Position:
        """An index at the first lane."""
        assert self.lanes is not None
        return self._position(index, {**self.dims, self.lanes.dim: self.lanes.start})

    def _position(self, index: Index, dims: Mapping[int, Position]) -> Position:
        f = self.f
        total: Position = index.constant
        for atom, factor in index.terms:
            total = f.iadd(total, f.imul(self._atom(atom, dims), factor))
        return total

    def _atom(self, atom: Atom, dims: Mapping[int, Position]) -> Position:
        f = self.f
        if atom.kind == "dim":
            return dims[atom.number]
        if atom.kind == "value":
            return self._integer(self.value(atom.number), self.plan.nodes[atom.number].dtype)
        assert atom.inner is not None
        inner = self._position(atom.inner, dims)
        if self._may_be_negative(atom.inner):
            return self._floor(atom, f.index(inner))
        return f.idiv(inner, atom.number) if atom.kind == "div" else f.irem(inner, atom.number)

    def _may_be_negative(self, index: Index) -> bool:
        """Whether an index is not known to be above zero: values in it may be negative."""
        return bool(index.values()) or index.bounds(self.plan.extents)[0] < 0

    def _floor(self, atom: Atom, inner: Value) -> Value:
        """The floor quotient, or the remainder that is never negative."""
        f, divisor, zero = self.f, constant(atom.number, inner.type), constant(0, inner.type)
        rest = f.binary("srem", inner, divisor)
        below = f.compare("slt", rest, zero)
        if atom.kind == "mod":
            return f.select(below, f.add(rest, divisor), rest)
        quotient = f.binary("sdiv", inner, divisor)
        return f.select(below, f.sub(quotient, constant(1, inner.type)), quotient)

    def _integer(self, value: Value, dtype: str) -> Value:
        wide = vector("i64", lanes_of(value.type))
        return self.f.cast("zext" if dtype.startswith("u") else "sext", value, wide)

    def varies(self, index: Index) -> bool:
        """Whether an index changes along the lanes."""
        if self.lanes is None:
            return False
        if self.lanes.dim in index.dims():
            return True
        return any(lanes_of(self.value(n).type) > 1 for n in index.values())

    def steps_by(self, index: Index) -> int | None:
        """By how much an index grows from lane to lane, or None if that is not the same everywhere."""
        assert self.lanes is not None
        if not index.is_linear_in(self.lanes.dim):
            return None
        if any(lanes_of(self.value(n).type) > 1 for n in index.values()):
            return None
        return index.factor(self.lanes.dim)

    def all_lanes(self, index: Index, element: str = "i64") -> Value:
        """An index at every lane, as a vector; terms that are equal for all lanes are computed once."""
        assert self.lanes is not None
        f, count = self.f, self.lanes.count
        varying = [term for term in index.terms if self.varies(Index((term,)))]
        fixed = self.position(Index(tuple(t for t in index.terms if t not in varying), index.constant))
        total = None if fixed == 0 else f.splat(f.cast("trunc", f.index(fixed), element), count)
        for atom, factor in varying:
            part = self._atom_lanes(atom, element)
            part = f.mul(part, constant(factor, part.type)) if factor != 1 else part
            total = part if total is None else f.add(total, part)
        return constant(0, vector(element, count)) if total is None else total

    def _atom_lanes(self, atom: Atom, element: str) -> Value:
        assert self.lanes is not None
        f, count = self.f, self.lanes.count
        if atom.kind == "dim":
            start = f.cast("trunc", f.index(self.lanes.start), element)
            return f.add(f.splat(start, count), f.lane_numbers(count, element))
        if atom.kind == "value":
            return self._integer(self.value(atom.number), self.plan.nodes[atom.number].dtype)
        assert atom.inner is not None
        # vectors are divided by constants through products of twice their width: cheap up to 32 bits
        narrow = "i32" if self._is_small(atom.inner) else element
        inner = self.all_lanes(atom.inner, narrow)
        if self._may_be_negative(atom.inner):
            return self._floor(atom, inner)
        operation = "udiv" if atom.kind == "div" else "urem"
        return f.cast(
            "zext", f.binary(operation, inner, constant(atom.number, inner.type)), vector(element, count)
        )

    def _is_small(self, index: Index) -> bool:
        """Whether an index fits into 32 bits, also at lanes a vector beyond its end."""
        if index.values():
            return False
        low, high = index.bounds(self.plan.extents)
        return low >= 0 and high < 1 << 30

    def index_value(self, node: IndexValue) -> Value:
        """A node that is an index: a scalar, or a vector if it changes along the lanes."""
        f, element = self.f, REGISTER[node.dtype]
        if self.varies(node.index):
            assert self.lanes is not None
            position = self._lane_positions(node.index)
        else:
            position = f.index(self.position(node.index))
        type_ = vector(element, lanes_of(position.type))
        if element in ("float", "double"):
            return f.cast("sitofp", position, type_)
        same = element_of(position.type) == element
        narrower = BYTES[node.dtype] < (8 if element_of(position.type) == "i64" else 4)
        return position if same else f.cast("trunc" if narrower else "sext", position, type_)

    def _lane_positions(self, index: Index) -> Value:
        """An index at every lane, in 32 bits if it fits and grows evenly: iotas are compared often."""
        assert self.lanes is not None
        f, step = self.f, self.steps_by(index)
        small = not index.values() and max(map(abs, index.bounds(self.plan.extents))) < 1 << 31
        if step is None or not small:
            return self.all_lanes(index)
        # lane k is at first + k · step: a splat and a constant, instead of an index expression per lane
        count = self.lanes.count
        first = f.cast("trunc", f.index(self.first(index)), "i32")
        numbers = [lane * step for lane in range(count)]
        return f.add(f.splat(first, count), vector_constant(numbers, "i32"))


Body = Callable[[list[Lanes], list[Value]], list[Value]]


def unflatten(
    f: FunctionBuilder, flat: Position, dims: Sequence[int], extents: Sequence[int]
) -> dict[int, Position]:
    """The index along each dim of a number that counts through them, the last one fastest."""
    indices: dict[int, Position] = {}
    for n, dim in enumerate(reversed(dims)):
        outermost = n == len(dims) - 1
        indices[dim] = flat if outermost else f.irem(flat, extents[dim])
        flat = f.idiv(flat, extents[dim])
    return indices


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

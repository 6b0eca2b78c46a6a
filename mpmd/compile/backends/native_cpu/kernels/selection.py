"""The first elements of sorted rows, without sorting the rest.

A row's best elements so far are in order in a few vectors.  The next elements are compared with the last of
them, many at once, and only the few that come before it are inserted: each lane takes its old element,
the new element, or its neighbour's.  Later elements never pass equal ones, so the order is stable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.kernels.places import Lanes
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.kernels.sorted_rows import SortingKernel, element, write
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY, widen
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value, constant, vector

_BITS = 64
"""Maximum of elements that are compared at once: one bit of a word for each."""
_MAX_RECOMPARED = 8
"""Best elements up to which a row's first blocks are compared again after each insertion: most of
those that come before the last of the best are then rejected.  Where more are kept, superfluous insertions
are cheaper."""
_FIRST_BLOCKS = 2
_MAX_UNROLLED = 4
"""Vectors of best elements up to which the insertion is unrolled."""


@dataclass(frozen=True)
class SelectionKernel(SortingKernel):
    """A kernel over a plan that sorts and keeps the first elements of each row.

    A unit is a row.  The workspace holds the best elements of each array.
    """

    @property
    def vectors(self) -> int:
        return -(-self.sorting.kept // self.target.lanes())

    @cached_property
    def places(self) -> list[int]:
        """Where the best elements of each array begin in the workspace, and where the last of them end."""
        places = [0]
        for array in self.sorting.arrays:
            size = self.vectors * self.target.lanes() * BYTES[array.dtype]
            places.append(places[-1] + -(-size // _BITS) * _BITS)
        return places

    @property
    def workspace_bytes(self) -> int:
        return self.places[-1]

    def emit_row(self, f: FunctionBuilder, row: Scope) -> None:
        _Row(self, f, row).select()


class _Row:
    """The code that selects from one row.

    Args:
        kernel: the kernel.
        f: its function.
        scope: the scope of the row.
    """

    def __init__(self, kernel: SelectionKernel, f: FunctionBuilder, scope: Scope) -> None:
        self.f = f
        self.plan = kernel.plan
        self.sorting = kernel.sorting
        self.length = kernel.plan.extents[kernel.sorting.along]
        self.vectors, self.lanes = kernel.vectors, kernel.target.lanes()
        self.scope = scope
        self.types = [MEMORY[a.dtype] for a in self.sorting.arrays]
        self.best = [f.offset(f.arguments["workspace"], at) for at in kernel.places[:-1]]

    def select(self) -> None:
        f, kept = self.f, self.sorting.kept
        at_once = min(_BITS, (self.length - kept) // self.lanes * self.lanes)
        first = kept if at_once else self.length
        with f.loop(0, first) as each:
            self._insert(each.i, each.i)
        if at_once:
            early = min(self.length, first + _FIRST_BLOCKS * at_once) if kept <= _MAX_RECOMPARED else first
            self._scan(first, early, at_once, again=True)
            self._scan(early, self.length, at_once)
        with f.loop(0, kept) as each:
            best = [f.load(row, type_, each.i) for row, type_ in zip(self.best, self.types)]
            write(self.scope, self.sorting, each.i, best)

    def _scan(self, first: int, end: int, at_once: int, *, again: bool = False) -> None:
        """Insert what comes before the last of the best, in blocks; the last block overlaps the one before.

        Args:
            first: the first element of the row to compare.
            end: the element after the last one.
            at_once: elements in a block.
            again: whether a block is compared again after each insertion.
        """
        if first == end:
            return
        f = self.f
        left = f.stack("i64")
        with f.loop(first, end, at_once) as block:
            start = f.imin(block.i, end - at_once)
            done = f.index(f.isub(block.i, start))
            bits = f.binary("shl", f.binary("lshr", self._better(start, at_once), done), done)
            zero = constant(0, "i64")
            with f.when(f.compare("ne", bits, zero)):
                f.store(bits, left)
                with f.repeat() as leave_if:
                    bits = f.load(left, "i64")
                    number = f.intrinsic("llvm.cttz.i64", "i64", bits, constant(1, "i1"))
                    self._insert(f.iadd(start, number))
                    if again:
                        later = f.sub(zero, f.binary("shl", constant(2, "i64"), number))
                        bits = f.and_(self._better(start, at_once), later)
                    else:
                        bits = f.and_(bits, f.sub(bits, constant(1, "i64")))
                    f.store(bits, left)
                    leave_if(f.compare("eq", bits, zero))

    def _better(self, start: Position, count: int) -> Value:
        """A bit for each of some elements: whether it comes before the last of the best."""
        f, row = self.f, self.sorting.along + 1
        last = [f.load(r, t, self.sorting.kept - 1) for r, t in zip(self.best, self.types)]
        bits = constant(0, "i64")
        for number in range(0, count, self.lanes):
            scope = self.scope.inside(lanes=Lanes(row, f.iadd(start, number), self.lanes))
            for array, value in zip(self.sorting.arrays, last):
                scope.define(array.element, widen(f, value, array.dtype))
            mask = f.cast("bitcast", scope.wide(self.sorting.before), f"i{self.lanes}")
            bits = f.or_(bits, f.shl(f.cast("zext", mask, "i64"), number))
        return bits

    def _insert(self, at: Position, count: Position | None = None) -> None:
        """Insert an element into the best elements, whose number is given; all if none is given."""
        f, zeros = self.f, constant(0, vector("i1", self.lanes))
        new = [element(self.scope, self.sorting, array, at) for array in self.sorting.arrays]
        nothing = [constant(0, vector(t, self.lanes)) for t in self.types]
        if self.vectors <= _MAX_UNROLLED:
            state = [zeros, *nothing]
            for number in range(self.vectors):
                state = self._insert_vector(new, number * self.lanes, count, state)
            return
        with f.loop(0, self.vectors * self.lanes, self.lanes, carried=[zeros, *nothing]) as part:
            part.carry(self._insert_vector(new, part.i, count, part.carried))

    def _insert_vector(
        self, new: Sequence[Value], at: Position, count: Position | None, state: Sequence[Value]
    ) -> list[Value]:
        """Insert into one vector, given the one before it and which of its lanes the new element passes."""
        f, lanes = self.f, self.lanes
        current = [f.load(row, vector(t, lanes), at) for row, t in zip(self.best, self.types)]
        passes = self._before(new, current)
        if count is not None:
            numbers = f.add(f.splat(f.index(at), lanes), f.lane_numbers(lanes, "i64"))
            passes = f.or_(passes, f.compare("sge", numbers, f.splat(f.index(count), lanes)))
        one_on = range(lanes - 1, 2 * lanes - 1)
        moves = f.shuffle(state[0], passes, one_on)
        for row, value, before, here in zip(self.best, new, state[1:], current):
            moved = f.select(moves, f.shuffle(before, here, one_on), f.splat(value, lanes))
            f.store(f.select(passes, moved, here), row, at)
        return [passes, *current]

    def _before(self, new: Sequence[Value], others: Sequence[Value]) -> Value:
        """Whether an element comes before each of some others."""
        scope = self.scope.inside(lanes=Lanes(self.sorting.along + 1, 0, self.lanes))
        for array, one, many in zip(self.sorting.arrays, new, others):
            scope.define(array.element, widen(self.f, many, array.dtype))
            if array.other >= 0:
                scope.define(array.other, widen(self.f, one, array.dtype))
        return scope.wide(self.sorting.before)

"""Sorting rows: all of a row by merging, or its first elements by selection.

Elements move in the form in which they lie in memory, all arrays together; the plan gives the comparison.
Both ways are stable.

Merging: short runs are put in order by insertion, then pairs of runs merge; of two equal elements the one of
the left run comes first.

Selection: the best elements so far are in order in a few vectors.  The next elements are compared with the
last of them, many at once, and only the few that come before it are inserted: each lane takes its old
element, the new one, or its neighbour's.  Later elements never pass equal ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.kernels.places import Lanes, product, unflatten
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY, narrow, widen
from mpmd.compile.kernels.kernel_plan import Load
from mpmd.compile.kernels.sort_patterns import SortedArray, Sorting
from mpmd.compile.llvm.cpu import LINE_BYTES
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value, constant, vector


@dataclass(frozen=True)
class SortingKernel(PlanKernel):
    """A kernel over a plan that sorts, not normalised.  A unit is a row.

    Attributes:
        sorting: the sorted arrays, and how much of them is kept.
    """

    sorting: Sorting

    @property
    def units(self) -> int:
        return product(self.plan.extents, range(self.sorting.along)) if self.plan.size else 0

    def emit_units(self, f: FunctionBuilder, pointers: dict[int, Value]) -> None:
        with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
            dims = unflatten(f, unit.i, range(self.sorting.along), self.plan.extents)
            self.emit_row(f, Scope(f, self.plan, pointers, dims=dims))

    @abstractmethod
    def emit_row(self, f: FunctionBuilder, row: Scope) -> None:
        """The code of one row, in a scope that knows where it lies."""


class _Row:
    """The code of one row."""

    def __init__(self, kernel: SortingKernel, f: FunctionBuilder, scope: Scope) -> None:
        self.f, self.scope, self.sorting = f, scope, kernel.sorting
        self.length = kernel.plan.extents[kernel.sorting.along]
        self.types = [MEMORY[a.dtype] for a in self.sorting.arrays]

    def compared(self, scope: Scope, a: Sequence[Value], b: Sequence[Value]) -> Scope:
        """A scope in which the comparison says whether element a comes before element b."""
        for array, first, second in zip(self.sorting.arrays, a, b):
            scope.define(array.element, widen(self.f, second, array.dtype))
            if array.other >= 0:
                scope.define(array.other, widen(self.f, first, array.dtype))
        return scope


def element(row: Scope, sorting: Sorting, array: SortedArray, at: Position) -> Value:
    """An array's element of a row, in its type in memory."""
    scope = row.inside({sorting.along: at})
    node = row.plan.nodes[array.element]
    if isinstance(node, Load):
        return row.f.load(row.pointers[array.source], MEMORY[array.dtype], scope.position(node.index))
    return narrow(row.f, scope.value(array.element), array.dtype)


def write(row: Scope, sorting: Sorting, number: Value, values: Sequence[Value]) -> None:
    """Write the element of each array, in its type in memory, to the position given by a count."""
    scope = row.inside()
    scope.define(sorting.count, row.f.cast("trunc", number, "i32"))
    for array, value in zip(sorting.arrays, values, strict=True):
        row.f.store(value, row.pointers[array.target], scope.position(array.place))


_RUN = 8
"""Elements that are put in order by insertion: a few, as each may pass all others of its run."""


@dataclass(frozen=True)
class MergeSortKernel(SortingKernel):
    """A kernel over a plan that sorts.

    A unit is a row.  The workspace holds two rows of each array.
    """

    @cached_property
    def _places(self) -> list[int]:
        """Where each array's two rows begin in the workspace, the first of each, and then the second."""
        places, at = [], 0
        for _ in range(2):
            for array in self.sorting.arrays:
                places.append(at)
                size = self.plan.extents[self.sorting.along] * BYTES[array.dtype]
                at += -(-size // LINE_BYTES) * LINE_BYTES
        return [*places, at]

    @property
    def workspace_bytes(self) -> int:
        return self._places[-1]

    def emit_row(self, f: FunctionBuilder, row: Scope) -> None:
        _MergedRow(self, f, row).sort()


class _MergedRow(_Row):
    def __init__(self, kernel: MergeSortKernel, f: FunctionBuilder, scope: Scope) -> None:
        super().__init__(kernel, f, scope)
        workspace, count = f.arguments["workspace"], len(self.types)
        rows = [f.offset(workspace, at) for at in kernel._places[:-1]]
        self.first, self.second = rows[:count], rows[count:]

    def sort(self) -> None:
        f, runs, passes = self.f, -(-self.length // _RUN), 0
        self._insert(self.first)
        while 1 << passes < runs:
            passes += 1
        width = constant(_RUN, "i64")
        # The two rows of the workspace change places after each pass, as pointers that the loop carries.
        with f.loop(0, passes, carried=[*self.first, *self.second, width]) as each:
            *rows, width = each.carried
            source, target = rows[: len(self.types)], rows[len(self.types) :]
            self._merge_all(source, target, width)
            each.carry([*target, *source, f.shl(width, 1)])
        self._finish(each.carried[: len(self.types)])

    # -- elements
    def _load(self, row: Sequence[Value], at: Position) -> list[Value]:
        return [self.f.load(pointer, type_, at) for pointer, type_ in zip(row, self.types)]

    def _store(self, values: Sequence[Value], row: Sequence[Value], at: Position) -> None:
        for value, pointer in zip(values, row):
            self.f.store(value, pointer, at)

    def _before(self, a: Sequence[Value], b: Sequence[Value]) -> Value:
        return self.compared(self.scope.inside(), a, b).value(self.sorting.before)

    # -- the steps
    def _insert(self, row: Sequence[Value]) -> None:
        """Read the operands, and put runs in order: each element moves forward past those that follow it."""
        f = self.f
        place = f.stack("i64")
        with f.loop(0, self.length) as each:
            values = [element(self.scope, self.sorting, array, each.i) for array in self.sorting.arrays]
            start = f.floor_to(each.i, _RUN)
            f.store(each.i, place)
            with f.repeat() as leave_if:
                here = f.load(place, "i64")
                leave_if(f.compare("eq", here, f.index(start)))
                ahead = f.isub(here, 1)
                passed = self._load(row, ahead)
                leave_if(f.not_(self._before(values, passed)))
                self._store(passed, row, here)
                f.store(f.index(ahead), place)
            self._store(values, row, f.load(place, "i64"))

    def _merge_all(self, source: Sequence[Value], target: Sequence[Value], width: Value) -> None:
        f, length = self.f, self.length
        with f.loop(0, length, f.shl(width, 1)) as pair:
            middle = f.imin(f.iadd(pair.i, width), length)
            end = f.imin(f.iadd(middle, width), length)
            self._merge(source, target, pair.i, f.index(middle), f.index(end))

    def _merge(
        self, source: Sequence[Value], target: Sequence[Value], low: Value, middle: Value, end: Value
    ) -> None:
        """Merge two runs, without branches: which element comes next cannot be foreseen."""
        f = self.f
        last_left, last_right = f.isub(middle, 1), f.isub(end, 1)
        with f.loop(low, end, carried=[low, middle]) as each:
            left, right = each.carried
            # A run that is used up gives its last element again, which is not taken: no load leaves the
            # runs.
            a = self._load(source, f.imin(left, last_left))
            b = self._load(source, f.imin(right, last_right))
            no_left, is_right = f.compare("sge", left, middle), f.compare("slt", right, end)
            # The right element is taken only if it comes strictly before the left one: equal ones keep
            # their order.
            takes = f.and_(is_right, f.or_(no_left, self._before(b, a)))
            self._store([f.select(takes, y, x) for x, y in zip(a, b)], target, each.i)
            step = f.cast("zext", takes, "i64")
            advanced = f.iadd(left, f.isub(1, step))
            each.carry([f.index(advanced), f.index(f.iadd(right, step))])

    def _finish(self, row: Sequence[Value]) -> None:
        f = self.f
        with f.loop(0, self.sorting.kept) as each:
            write(self.scope, self.sorting, each.i, self._load(row, each.i))


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
        _SelectedRow(self, f, row).select()


class _SelectedRow(_Row):
    def __init__(self, kernel: SelectionKernel, f: FunctionBuilder, scope: Scope) -> None:
        super().__init__(kernel, f, scope)
        self.vectors, self.lanes = kernel.vectors, kernel.target.lanes()
        self.best = [f.offset(f.arguments["workspace"], at) for at in kernel.places[:-1]]

    def select(self) -> None:
        f, kept = self.f, self.sorting.kept
        at_once = min(_BITS, (self.length - kept) // self.lanes * self.lanes)
        # The first `kept` elements are inserted as they come; the rest is scanned in blocks, if it fills a
        # vector.
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
        """Insert elements that come before the last of the best; the last block overlaps its neighbour.

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
            # The last block begins early enough to be whole; the bits of elements that were done before are
            # shifted out.
            start = f.imin(block.i, end - at_once)
            done = f.index(f.isub(block.i, start))
            bits = f.binary("shl", f.binary("lshr", self._better(start, at_once), done), done)
            zero = constant(0, "i64")
            with f.when(f.compare("ne", bits, zero)):
                f.store(bits, left)
                with f.repeat() as leave_if:
                    bits = f.load(left, "i64")
                    # the next candidate, in the order of the row: equal elements stay in order
                    number = f.intrinsic("llvm.cttz.i64", "i64", bits, constant(1, "i1"))
                    self._insert(f.iadd(start, number))
                    if again:
                        # Compared anew with the last of the best, which the insertion has changed; of later
                        # elements alone.
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
        """Inserts element `at` into the best elements; the first `count` are valid (None: all)."""
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
            # lanes beyond the number of elements hold nothing yet: every element passes them
            passes = f.or_(passes, f.compare("sge", numbers, f.splat(f.index(count), lanes)))
        # Shifts a vector by a lane, the last lane of the vector before it coming in. `passes` is monotonic,
        # since the best are in order: lanes that the element passes move on, and it lands in the first of
        # them.
        one_on = range(lanes - 1, 2 * lanes - 1)
        moves = f.shuffle(state[0], passes, one_on)
        for row, value, before, here in zip(self.best, new, state[1:], current):
            moved = f.select(moves, f.shuffle(before, here, one_on), f.splat(value, lanes))
            f.store(f.select(passes, moved, here), row, at)
        return [passes, *current]

    def _before(self, new: Sequence[Value], others: Sequence[Value]) -> Value:
        scope = self.scope.inside(lanes=Lanes(self.sorting.along + 1, 0, self.lanes))
        return self.compared(scope, new, others).wide(self.sorting.before)

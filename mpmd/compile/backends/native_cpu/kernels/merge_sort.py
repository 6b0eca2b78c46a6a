"""Sorting rows by merging: short runs are put in order one element after the other, then pairs of runs merge.

A merge keeps the left one of two equal elements first, so that the order is stable whatever the comparison.
Elements are moved as they lie in memory, all arrays together; the comparison is that of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.kernels.sorted_rows import SortingKernel, element, write
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY, widen
from mpmd.compile.llvm.cpu import LINE_BYTES
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value, constant

_RUN = 8
"""Elements that are put in order by insertion: a few, as each may pass all others of its run."""


@dataclass(frozen=True)
class MergeSortKernel(SortingKernel):
    """A kernel over a plan that sorts.

    A unit is a row.  The workspace holds two rows of each array.
    """

    @property
    def _length(self) -> int:
        return self.plan.extents[self.sorting.along]

    @cached_property
    def _places(self) -> list[int]:
        """Where each array's two rows begin in the workspace, the first of each, and then the second."""
        places, at = [], 0
        for _ in range(2):
            for array in self.sorting.arrays:
                places.append(at)
                size = self._length * BYTES[array.dtype]
                at += -(-size // LINE_BYTES) * LINE_BYTES
        return [*places, at]

    @property
    def workspace_bytes(self) -> int:
        return self._places[-1]

    def emit_row(self, f: FunctionBuilder, row: Scope) -> None:
        _Row(self, f, row).sort()


class _Row:
    """The code that sorts one row.

    Args:
        kernel: the kernel.
        f: its function.
        scope: where the row lies.
    """

    def __init__(self, kernel: MergeSortKernel, f: FunctionBuilder, scope: Scope) -> None:
        self.f = f
        self.plan = kernel.plan
        self.sorting = kernel.sorting
        self.length = kernel._length
        self.scope = scope
        self.types = [MEMORY[a.dtype] for a in self.sorting.arrays]
        workspace, count = f.arguments["workspace"], len(self.types)
        rows = [f.offset(workspace, at) for at in kernel._places[:-1]]
        self.first, self.second = rows[:count], rows[count:]

    def sort(self) -> None:
        f, runs, passes = self.f, -(-self.length // _RUN), 0
        self._insert(self.first)
        while 1 << passes < runs:
            passes += 1
        width = constant(_RUN, "i64")
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
        """Whether element a comes before element b."""
        scope = self.scope.inside()
        for array, first, second in zip(self.sorting.arrays, a, b):
            scope.define(array.element, widen(self.f, second, array.dtype))
            if array.other >= 0:
                scope.define(array.other, widen(self.f, first, array.dtype))
        return scope.value(self.sorting.before)

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
            a = self._load(source, f.imin(left, last_left))
            b = self._load(source, f.imin(right, last_right))
            no_left, is_right = f.compare("sge", left, middle), f.compare("slt", right, end)
            takes = f.and_(is_right, f.or_(no_left, self._before(b, a)))
            self._store([f.select(takes, y, x) for x, y in zip(a, b)], target, each.i)
            step = f.cast("zext", takes, "i64")
            advanced = f.iadd(left, f.isub(1, step))
            each.carry([f.index(advanced), f.index(f.iadd(right, step))])

    def _finish(self, row: Sequence[Value]) -> None:
        f = self.f
        with f.loop(0, self.sorting.kept) as each:
            write(self.scope, self.sorting, each.i, self._load(row, each.i))

"""Fetching in advance: lines that a micro-kernel brings into L2 while it multiplies, for what comes after it.

A tile takes thousands of cycles and reads from L1 and L2; memory behind L2 is idle meanwhile.  So the caller
of micro-kernels passes a *fetch* to them in memory: runs of adjacent lines, equally spaced, such as the rows
of the strip that is packed next.  Every few steps of K a micro-kernel prefetches a line and stores the
position for the next tile.  Past the end, the last line is prefetched again, which is cached by then.
"""

from __future__ import annotations

from mpmd.compile.llvm.builder import FunctionBuilder, Index
from mpmd.compile.llvm.target import LINE_BYTES
from mpmd.compile.llvm.types import Value, constant

_POSITION, _LEFT, _RUN, _JUMP, _END = range(5)  # fields, each of 8 bytes


class Fetch:
    """A fetch in memory, as its owner sees it.

    Args:
        f: the function that calls micro-kernels.
    """

    def __init__(self, f: FunctionBuilder) -> None:
        self.f = f
        self.place = f.stack("i64", 8)

    def runs(self, start: Value, count: Index, distance: Index, size: Index) -> None:
        """Prefetch runs of bytes.

        Args:
            start: the first byte.
            count: how many runs, at least one.
            distance: bytes from a run to the next.
            size: bytes of a run, at least one.
        """
        f = self.f
        # a run of so many bytes may begin within a line
        lines = f.idiv(f.iadd(size, 2 * LINE_BYTES - 2), LINE_BYTES)
        if (
            isinstance(size, int)
            and isinstance(distance, int)
            and size % LINE_BYTES == distance % LINE_BYTES == 0
        ):
            lines = size // LINE_BYTES
        reach = f.isub(f.iadd(f.imul(f.isub(count, 1), distance), size), 1)
        jump = f.isub(distance, f.imul(f.isub(lines, 1), LINE_BYTES))
        self._set(f.isub(0, reach), lines, jump, f.offset(start, reach))

    def nothing(self, near: Value) -> None:
        self._set(0, 1, 0, near)

    def is_done(self) -> Value:
        """I1, whether every line has been prefetched."""
        position = self.f.load(self.place, "i64", _POSITION)
        return self.f.compare("sge", position, constant(0, "i64"))

    def _set(self, position: Index, run: Index, jump: Index, end: Value) -> None:
        f = self.f
        for field, value in ((_POSITION, position), (_LEFT, run), (_RUN, run), (_JUMP, jump)):
            f.store(f.index(value), self.place, field)
        f.store(end, self.place, _END)


class Fetching:
    """A fetch as the micro-kernel that continues it sees it.

    What goes round its loops is a list of `STATE` values: bytes from the fetch's end to its next line, and
    the lines that are left of the run.

    Args:
        f: the micro-kernel.
        place: the fetch.
    """

    STATE = 2

    def __init__(self, f: FunctionBuilder, place: Value) -> None:
        self.f = f
        self.place = place
        self.start = [f.load(place, "i64", _POSITION), f.load(place, "i64", _LEFT)]
        self._run, self._jump = f.load(place, "i64", _RUN), f.load(place, "i64", _JUMP)
        self._end = f.load(place, "ptr", _END)

    def line(self, state: list[Value]) -> list[Value]:
        """Prefetch a line; returns the state after it."""
        f, (position, left) = self.f, state
        f.prefetch(f.offset(self._end, f.imin(position, 0)), locality=2)
        fewer = f.index(f.isub(left, 1))
        done = f.compare("eq", fewer, constant(0, "i64"))
        position = f.index(f.iadd(position, f.select(done, self._jump, constant(LINE_BYTES, "i64"))))
        return [position, f.select(done, self._run, fewer)]

    def leave(self, state: list[Value]) -> None:
        for field, value in zip((_POSITION, _LEFT), state, strict=True):
            self.f.store(value, self.place, field)

"""Rows to come: their lines are asked for while the rows before them are computed.

The first pass over a row reads memory, the others caches.  Without requests memory rests during those.

* In between, where a cache holds the arrays, or arithmetic takes longest: the second pass asks for what the
  next block of rows reads.
* In turn, where caches may have lost the results' lines: a store to such a line waits for memory, and the
  core for the store.  The pass before the one that writes asks for these lines, to write them, and the last
  one for what the next block reads.
* Along, where the first pass over the next block goes on beside dear functions of this one: it asks for what
  lies a good way ahead of what it reads, since it does not read often enough for the core to look far ahead.
* Beside results, where memory takes longest and results pass the caches: a core writes them and sums the
  next row at the same time, as a copy does, and all passes but the first ask for what lies some rows ahead.
* Evenly, where two arrays are read, or two passes are all there are: every pass asks for as large a part of
  the next row.  Stores past the caches drain slowly, but a core lets some sixty lines of them wait, a short
  row's, and goes on with the next row meanwhile; so memory is written to all the time, and has to be read all
  the time as well.  Requests are for the second cache: the first one's places for what it waits for are those
  of such stores, too.  They must stay within a page of what is read: farther ahead they make reading slower,
  and longer rows are asked for in between.

A core compares addresses by their places in pages first: a request for a place that is written at that moment
in another page holds up one or the other.  So requests beside results keep half a page away from what is
written, wherever the arrays lie.

Measured on Zen 4, of a copy's bandwidth, rows of 1 to 4 KB past the caches: layer norm of f32 with even
requests 0.6-0.98, by the length of rows, by where the arrays lie, and by what others do to memory; beside
results 0.9-1.02, the same from C.  Of bf16 0.55-0.7 and 0.65-0.85.  Layer norm of what the kernel before
wrote, 3 MB into 3 MB of 12 to 72, is 1.1-1.5 times as fast with requests in turn as in between; into 3 MB
that were read last as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mpmd.compile.backends.native_cpu.emit.ahead import LINE, Run
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.kernels.plan import KernelPlan

PAGE = 4 << 10  # bytes, by which requests may run ahead in one place, too
_FARTHEST = 7 << 10  # the same in all places together
_GOOD_WAY = 8 << 10  # bytes ahead of what is read beside dear functions
_BESIDE_RESULTS = 5 << 10  # the same beside results that memory takes
_FIRST_CACHE, _SECOND_CACHE = 3, 2  # as LLVM numbers where requests go


@dataclass(frozen=True)
class Part:
    """One of some equal parts of a row.

    Attributes:
        number: which.
        of: how many there are.
    """

    number: int
    of: int


@dataclass(frozen=True)
class ComingRows:
    """What the passes over a block of rows ask for of the next block.

    Attributes:
        plan: the plan.
        runs: what is read in each row.
        parts: which part of the rows each pass asks for, or None if it asks for nothing.
        locality: into which cache.
        distance: bytes from where the passes are in the rows to what they ask for.
        results: what is written in each row, and not read before.
        claims: the pass that asks for the lines of the results of its own rows, to write them; -1: none.
        steady: whether memory is read at all times, also while results go there.
        rows: of a block.
        bases: where the arrays that are read begin, each as far ahead as is asked for.
    """

    plan: KernelPlan
    runs: tuple[Run, ...] = ()
    parts: tuple[Part | None, ...] = ()
    locality: int = _FIRST_CACHE
    distance: int = 0
    results: tuple[Run, ...] = ()
    claims: int = -1
    steady: bool = False
    rows: int = 1
    bases: Mapping[int, Value] = field(default_factory=dict)

    @staticmethod
    def between(plan: KernelPlan, runs: Sequence[Run], *, near: bool) -> ComingRows:
        """All of it during the second pass; `near`: into the first cache."""
        return ComingRows(plan, tuple(runs), (None, Part(0, 1)), _FIRST_CACHE if near else _SECOND_CACHE)

    @staticmethod
    def along(plan: KernelPlan, runs: Sequence[Run]) -> ComingRows:
        """What the first pass over the next block will read soon."""
        return ComingRows(plan, tuple(runs), (Part(0, 1),), _SECOND_CACHE, _GOOD_WAY)

    @staticmethod
    def evenly(plan: KernelPlan, runs: Sequence[Run], passes: int) -> ComingRows:
        """A part during each pass."""
        parts = tuple(Part(k, passes) for k in range(passes))
        return ComingRows(plan, tuple(runs), parts, _SECOND_CACHE, steady=True)

    @staticmethod
    def beside_results(
        plan: KernelPlan, runs: Sequence[Run], results: Sequence[Run], passes: int, rows: int
    ) -> ComingRows:
        """What lies ahead of the first pass over the next block, a part during each of the other passes."""
        parts = (None, *(Part(k, passes - 1) for k in range(passes - 1)))
        ahead = ComingRows(plan, tuple(runs), parts, _SECOND_CACHE, _BESIDE_RESULTS, tuple(results))
        return replace(ahead, steady=True, rows=rows)

    @staticmethod
    def in_turn(plan: KernelPlan, runs: Sequence[Run], results: Sequence[Run], passes: int) -> ComingRows:
        """What the last pass writes during the pass before it, all of the next rows during the last one."""
        parts = (*[None] * (passes - 1), Part(0, 1))
        return ComingRows(plan, tuple(runs), parts, results=tuple(results), claims=passes - 2)

    @staticmethod
    def within_a_page(plan: KernelPlan, runs: Sequence[Run], rows: int) -> bool:
        """Whether the next block of so many rows is not too far ahead for memory."""
        sizes = [rows * plan.extents[-1] * BYTES[plan.operands[run.operand].dtype] for run in runs]
        longest = PAGE if rows == 1 else PAGE - 1
        return max(sizes, default=0) <= longest and sum(sizes) <= _FARTHEST

    def based(self, f: FunctionBuilder, pointers: Mapping[int, Value]) -> ComingRows:
        """The same with what is known once in a function: where what is asked for lies.

        Args:
            f: the function.
            pointers: address of each operand.
        """
        if not self.distance:
            return self
        bases = {}
        for run in self.runs:
            pointer, far = pointers[run.operand], self._distance(f, run, pointers)
            bases[run.operand] = f.op(f"getelementptr i8, ptr {pointer}, i64 {far}", "ptr")
        return replace(self, bases=bases)

    def _distance(self, f: FunctionBuilder, run: Run, pointers: Mapping[int, Value]) -> Position:
        """Bytes from where the first pass is in a run to what is asked for.

        Up to a page more than the least, so that places in pages that are written meanwhile and those that
        are asked for are half a page apart.
        """
        plan, size = self.plan, BYTES[self.plan.operands[run.operand].dtype]
        equal = [r for r in self.results if BYTES[plan.operands[r.operand].dtype] == size]
        if not (self.steady and equal):
            return self.distance
        width, parts = plan.extents[-1] * size, sum(part is not None for part in self.parts)
        # in the last pass, on an average, were both arrays in one place
        lead = self.rows * width + width * (parts - 1) // parts + width // (2 * parts) - width // 2
        lead += (run.index.constant - equal[0].index.constant) * size + self.distance
        written, read = (f.op(f"ptrtoint ptr {pointers[r.operand]} to i64", "i64") for r in (equal[0], run))
        apart = f.iadd(f.sub(written, read), self.farthest_apart(width) - lead)
        return f.iadd(f.and_(f.index(apart), constant(PAGE - LINE, "i64")), self.distance)

    def farthest_apart(self, width: int) -> int:
        """How far from what is written to ask, modulo a page, to be far from the places of all rows."""
        rows = [k * width for k in range(1 - self.rows, self.rows)]

        def nearest(place: int) -> int:
            return min(min((place + row) % PAGE, -(place + row) % PAGE) for row in rows)

        return max(range(0, PAGE, LINE), key=nearest)

    def during(self, number: int) -> bool:
        """Whether a pass asks for anything."""
        return bool(self.runs) and number < len(self.parts) and self.parts[number] is not None

    def ask(self, number: int, rows: Sequence[Scope], vectors: Sequence[Lanes]) -> None:
        """Ask for the lines whose turn it is during one round of a pass.

        Args:
            number: the pass.
            rows: where one row of the next block is known each.
            vectors: the round's: adjacent ones, or halves of such.
        """
        part = self.parts[number] if self.during(number) else None
        if part is None or not rows:
            return
        f, first = rows[0].f, vectors[0]
        start = f.iadd(part.number * -(-self.plan.extents[-1] // part.of), f.idiv(first.start, part.of))
        count = -(-len(vectors) * first.count // part.of)
        for run in self.runs:
            for row, address in self._lines(run, rows, replace(first, start=start), count):
                row.f.prefetch(address, locality=self.locality)

    def claim(self, number: int, rows: Sequence[Scope], vectors: Sequence[Lanes]) -> None:
        """Ask for the lines that a later pass over these rows writes, during one round of a pass."""
        if number != self.claims:
            return
        for run in self.results:
            for row, address in self._lines(run, rows, vectors[0], len(vectors) * vectors[0].count):
                row.f.prefetch(address, write=True)

    def _lines(
        self, run: Run, rows: Sequence[Scope], first: Lanes, count: int
    ) -> Iterator[tuple[Scope, Value]]:
        """The address of each line of some elements, row by row, `distance` ahead."""
        size = BYTES[self.plan.operands[run.operand].dtype]
        for offset in range(0, count, LINE // size):
            for row in rows:
                f = row.f
                place = Lanes(first.dim, f.iadd(first.start, offset), 1)
                at = f.imul(row.inside(lanes=place).first(run.index), size)
                # the array may end before that place
                pointer = self.bases.get(run.operand, row.pointers[run.operand])
                yield row, f.op(f"getelementptr i8, ptr {pointer}, i64 {at}", "ptr")

"""Transposes past the caches: squares in registers, whole lines written in diagonals.

A result that passes the caches is written in lines, each once, so no buffer is needed to make its runs
longer.  What counts is where lines lie.  If rows of the result are an even number of lines apart, all lines
of one column are in the same half of the memory's channels: a line in every row, and then the next line in
every row, keeps one half waiting.  So two squares a line apart along the rows of the result are written in
turn: line 0 of one row, line 2 of the next; then the other two.

A panel is a few lines of every row of the result, as many rows of the source as these have elements, side by
side over a strip that the second cache holds twice.  While one panel is transposed the next one is asked for
in memory's order, as many lines as are written.  The second cache drops requests while it has too many, so
each line is asked for several times.

Measured on Zen 4 with 768 columns, of a copy's bandwidth, for rows an even and an odd number of lines apart.
In C, squares of lines that follow each other: one at a time 0.62 and 0.88, two 0.77 and 0.81, two in turn
0.81 and 0.83; lines one apart, with four requests for each line: 0.82 and 0.95 with requests after eight
stores, 0.87 and 0.98 after sixteen, 0.79 and 0.86 after thirty-two.  Ours 0.81-0.89 and 0.92-0.97,
packed 0.7-0.8.  Of other widths 0.8-0.97, packed 0.55-0.9; 1,024 in strips
of 48 and 16 lines instead of twice 32 0.64 instead of 0.97.
Writing alone: a line in each row 15 GB/s, two 24, lines in diagonals 26, rows one after the other 27.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.crossing import Tile, crossing_loads, only_moves
from mpmd.compile.backends.native_cpu.emit.nest import product, unflatten
from mpmd.compile.backends.native_cpu.emit.panel_ahead import PanelAhead
from mpmd.compile.backends.native_cpu.emit.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.squares import transpose
from mpmd.compile.backends.native_cpu.llvm.types import Value, vector
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import KernelPlan, Load

_LINE_BYTES = 64
_SIZES = (2, 4, 8)  # bytes of an element
_REGISTERS = 16  # of a line, for one of two squares
_LINES = 4  # of a row of the result in a panel
_ASKED = 4  # lines of a row that are asked for at once: a strip has whole such groups
_BURST = 16  # stores, and then requests, after each other
_TIMES = 4  # that each line is asked for
_WAYS = 8  # of the first cache
_ALIKE = 32 << 10  # bytes: rows that are a multiple of it apart are better written in longer runs


@dataclass(frozen=True)
class StreamedTransposeKernel(PlanKernel):
    """A kernel over a plan of kind `loop` that only moves what one load reads along its crossing dim.

    A unit is a panel, of one strip and one index of the other dims.  Panels follow each other along the last
    dim.

    Attributes:
        crossing: the crossing dim.
        streamed: numbers of the results that go past the caches.
    """

    crossing: int
    streamed: frozenset[int]

    @staticmethod
    def suits(plan: KernelPlan, target: CpuTarget, crossing: int, streamed: frozenset[int]) -> bool:
        """Whether all results pass the caches, in whole lines, and one load is all that they come from."""
        loads = crossing_loads(plan, crossing)
        if len(loads) != 1 or not only_moves(plan, crossing):
            return False
        if {s.operand for s in plan.stores} != set(streamed) or target.vector_bytes != _LINE_BYTES:
            return False
        kernel = StreamedTransposeKernel(plan.name, plan, target, crossing, streamed)
        if kernel._tile.bytes not in _SIZES or plan.extents[-1] % kernel._tile.lanes:
            return False
        long = plan.extents[crossing] >= kernel._tile.lanes and plan.extents[-1] >= kernel._rows
        apart = all(s.index.factor(crossing) * kernel._tile.bytes % _ALIKE for s in plan.stores)
        return long and apart and kernel._keeps_lines

    @property
    def units(self) -> int:
        """Panels of everything."""
        if not self.plan.size:
            return 0
        return product(self.plan.extents, self._outer) * self._strips * self._panels

    # -- sizes ---------------------------------------------------------------------------------------------
    @property
    def _outer(self) -> list[int]:
        return [d for d in range(self.plan.rank - 1) if d != self.crossing]

    @cached_property
    def _tile(self) -> Tile:
        (number,) = crossing_loads(self.plan, self.crossing)
        node = self.plan.nodes[number]
        assert isinstance(node, Load)
        lanes = _LINE_BYTES // BYTES[node.dtype]
        return Tile(number, node, node.index.factor(self.plan.rank - 1), lanes, min(lanes, _REGISTERS))

    @property
    def _rows(self) -> int:
        """Rows of the source in a panel."""
        return _LINES * self._tile.lanes

    @property
    def _panels(self) -> int:
        return -(-self.plan.extents[-1] // self._rows)

    @property
    def _blocks(self) -> int:
        """Lines of a row of the source."""
        return -(-self.plan.extents[self.crossing] // self._tile.lanes)

    @cached_property
    def _strip(self) -> int:
        """Lines of a row of the source in a panel: a whole row, or about equal parts of it."""
        most = max(1, self.target.l2_bytes // 3 // (self._rows * _LINE_BYTES))
        strips = -(-self._blocks // most)
        if strips == 1:
            return self._blocks
        return -(-self._blocks // (strips * _ASKED)) * _ASKED

    @property
    def _strips(self) -> int:
        return -(-self._blocks // self._strip)

    @property
    def _keeps_lines(self) -> bool:
        """Whether the first cache keeps the lines of two squares until all of them were read."""
        if self._tile.columns == self._tile.lanes:  # at once
            return True
        sets, lanes = self.target.l1_bytes // (_WAYS * _LINE_BYTES), self._tile.lanes
        rows = (*range(lanes), *range(self._rows // 2, self._rows // 2 + lanes))
        met = Counter(abs(k * self._tile.step * self._tile.bytes) // _LINE_BYTES % sets for k in rows)
        return max(met.values()) <= _WAYS

    # -- code ----------------------------------------------------------------------------------------------
    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module."""
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            if self.units:
                pointers = {k: f.arguments[name] for k, name in enumerate(self.pointers)}
                emit_streaming(f, pointers, self.streamed, lambda streams: self._emit(f, pointers, streams))
        return ()

    def _emit(self, f: FunctionBuilder, pointers: dict[int, Value], streams: bool) -> None:
        extent, lanes = self.plan.extents[self.crossing], self._tile.lanes
        start = Scope(f, self.plan, pointers)
        start.hoist(range(len(self.plan.nodes)), 1)
        with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
            scope, strip, row = self._panel_at(start, unit.i)
            ahead = self._ahead(start, f.imin(f.iadd(unit.i, 1), f.isub(f.arguments["end"], 1)))
            before = f.imul(strip, self._strip)
            with f.loop(0, f.imin(self._strip, f.isub(self._blocks, before))) as block:
                column: Position = f.imul(f.iadd(before, block.i), lanes)
                if extent % lanes:  # the last block looks back, not past the end
                    column = f.imin(column, extent - lanes)
                with f.loop(0, _LINES // 2) as pair:
                    step = f.imul(f.iadd(f.imul(block.i, _LINES // 2), pair.i), 2 * lanes // _BURST)
                    first = f.iadd(row, f.imul(pair.i, lanes))
                    for part in range(0, lanes, self._tile.columns):
                        asks = functools.partial(self._ask, f, ahead, f.iadd(step, 2 * part // _BURST))
                        self._two_squares(scope, f.iadd(column, part), first, streams, asks)

    def _panel_at(self, start: Scope, unit: Position) -> tuple[Scope, Position, Position]:
        """Where a panel is: a scope with its outer dims, strip, and first row; the last looks back."""
        f, extent = start.f, self.plan.extents[-1]
        row: Position = f.imul(f.irem(unit, self._panels), self._rows)
        if extent % self._rows:
            row = f.imin(row, extent - self._rows)
        rest = f.idiv(unit, self._panels)
        outer = unflatten(f, f.idiv(rest, self._strips), self._outer, self.plan.extents)
        return start.inside(outer), f.irem(rest, self._strips), row

    def _ahead(self, start: Scope, unit: Position) -> list[PanelAhead]:
        """What is asked for during a panel: the next one, and what lies parts of a panel before it."""
        f, tile = start.f, self._tile
        scope, strip, row = self._panel_at(start, unit)
        corner = self._address(scope, f.imul(strip, self._strip * tile.lanes), row)
        back = [k * self._rows // _TIMES * tile.step * tile.bytes for k in range(_TIMES)]
        return [PanelAhead(f, tile, f.offset(corner, -b), self._strip * tile.lanes) for b in back]

    def _ask(self, f: FunctionBuilder, ahead: Sequence[PanelAhead], start: Position, step: int) -> None:
        """Ask for the lines of a step, between the stores before and after it."""
        f.keep_order()
        for panel in ahead:
            for part in range(_BURST // _ASKED):
                panel.ask(f.iadd(f.imul(f.iadd(start, step), _BURST // _ASKED), part), _ASKED)
        f.keep_order()

    def _address(self, scope: Scope, column: Position, row: Position) -> Value:
        at = scope.inside({self.plan.rank - 1: row, self.crossing: column}).position(self._tile.node.index)
        return scope.f.offset(scope.pointers[self._tile.node.operand], at, self._tile.element)

    def _two_squares(
        self, scope: Scope, column: Position, row: Position, streams: bool, asks: Callable[[int], None]
    ) -> None:
        """Transpose two squares, one of them half a panel below the other in the source.

        Args:
            scope: with the outer dims.
            column: of the source, the first one.
            row: of the source, the first one.
            streams: whether lines pass the caches.
            asks: called after every few stores with their number.
        """
        f, plan, tile = scope.f, self.plan, self._tile
        corner, type_ = self._address(scope, column, row), vector(tile.element, tile.columns)
        below = self._rows // 2
        lines = [
            transpose(f, [f.load(corner, type_, (first + k) * tile.step) for k in range(tile.lanes)])
            for first in (0, below)
        ]
        in_turn = [(k, (k + turn) % 2) for turn in (0, 1) for k in range(tile.columns)]
        for number, (k, line) in enumerate(in_turn):
            place = {self.crossing: f.iadd(column, k), plan.rank - 1: f.iadd(row, line * below)}
            at = scope.inside(place)
            for item in plan.stores:
                pointer = scope.pointers[item.operand]
                f.store(lines[line][k], pointer, at.position(item.index), streams=streams)
            if number % _BURST == _BURST - 1:
                asks(number // _BURST)

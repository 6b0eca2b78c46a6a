"""Large transposes: blocks that cross go through a small packed buffer, so that memory sees long runs.

Where a square is transposed in registers its result is one line in each of many rows.  Memory takes lines
slowly that way: caches fetch a line before it is overwritten, and what they do ahead of time they do along
rows.  Rows a power of two apart even share a few places of the first cache.  Here a block has many rows of
the source, of which it reads one line each; neighbouring rows are interleaved in registers into pieces of 16
bytes and left in a packed buffer inside of the first cache.  A row of the result is put together from such
pieces and written several lines at a time.

Blocks side by side form a panel.  While a panel is done, the next one is asked for, row by row as it lies in
memory, up to the second cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.crossing import (
    PIECE_BYTES,
    Tile,
    crossing_loads,
    moved_lanes,
    only_moves,
)
from mpmd.compile.backends.native_cpu.emit.loop import store_all, stored_nodes
from mpmd.compile.backends.native_cpu.emit.nest import product, unflatten
from mpmd.compile.backends.native_cpu.emit.panel_ahead import PanelAhead
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.emit.together import vectors_at_once
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.squares import within_pieces
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant, vector
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import BYTES, widen
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import KernelPlan, Load

_LINE_BYTES = 64
_BUFFER_BYTES = 16 << 10  # half of a first cache
# Rows of a block: runs of 256 or 512 bytes in the result.  Past the caches less is better, and whole rows of
# the source side by side.
_ROWS, _STREAMED_ROWS = 128, 64
_LINES, _STREAMED_LINES = 8, 48
_FEWEST_ROWS = 32  # below, squares are done sooner


@dataclass(frozen=True)
class PackedKernel(PlanKernel):
    """A kernel over a plan of kind `loop` with a crossing dim, both it and the last dim long enough.

    A unit is a panel: blocks side by side along the crossing dim, of one index of the other dims.  Panels
    follow each other along the last dim, so that rows of the result are continued.

    Attributes:
        crossing: the crossing dim.
        streamed: numbers of the results that go past the caches.
    """

    crossing: int
    streamed: frozenset[int] = frozenset()

    @staticmethod
    def suits(plan: KernelPlan, target: CpuTarget, crossing: int) -> bool:
        """Whether a plan's dims are long enough, whole blocks fill them well, and few enough things cross."""
        kernel, extent = PackedKernel(plan.name, plan, target, crossing), plan.extents[crossing]
        whole = kernel._blocks * kernel._columns
        long = plan.extents[-1] >= max(kernel._lanes, _FEWEST_ROWS) and extent >= kernel._columns
        return long and 2 * whole <= 3 * extent and kernel._most_rows > 0

    @property
    def units(self) -> int:
        """Panels of everything."""
        if not self.plan.size:
            return 0
        return product(self.plan.extents, self._outer) * self._strips * self._row_blocks

    # -- sizes ---------------------------------------------------------------------------------------------
    @property
    def _outer(self) -> list[int]:
        return [d for d in range(self.plan.rank - 1) if d != self.crossing]

    @cached_property
    def _tiles(self) -> tuple[Tile, ...]:
        """The loads that cross; a block has a line of the narrowest of them."""
        plan, found = self.plan, []
        numbers = crossing_loads(plan, self.crossing)
        columns = _LINE_BYTES // min(BYTES[plan.nodes[k].dtype] for k in numbers)
        for k in numbers:
            node = plan.nodes[k]
            assert isinstance(node, Load)
            lanes = self.target.vector_bytes // BYTES[node.dtype]
            found.append(Tile(k, node, node.index.factor(plan.rank - 1), lanes, columns))
        return tuple(found)

    @property
    def _columns(self) -> int:
        return self._tiles[0].columns

    @cached_property
    def _moves(self) -> bool:
        return only_moves(self.plan, self.crossing)

    @cached_property
    def _lanes(self) -> int:
        """Elements of a vector along the last dim."""
        return moved_lanes(self.plan, self.target) if self._moves else self.target.lanes()

    @cached_property
    def _multiple(self) -> int:
        """What a block's rows are a multiple of: whole vectors and pieces."""
        return max(self._lanes, *(t.piece for t in self._tiles))

    @cached_property
    def _most_rows(self) -> int:
        """Rows of a block that fit into the buffers."""
        most = _STREAMED_ROWS if self.streamed else _ROWS
        fitting = _BUFFER_BYTES // (self._columns * sum(t.bytes for t in self._tiles))
        return min(most, fitting) // self._multiple * self._multiple

    @cached_property
    def _rows(self) -> int:
        """Indices of the last dim in a block, the last block about as large as the others."""
        extent = self.plan.extents[-1]
        blocks = -(-extent // self._most_rows)
        return -(-extent // (blocks * self._multiple)) * self._multiple

    @property
    def _row_blocks(self) -> int:
        return -(-self.plan.extents[-1] // self._rows)

    @property
    def _blocks(self) -> int:
        """Blocks along the crossing dim."""
        return -(-self.plan.extents[self.crossing] // self._columns)

    @cached_property
    def _panel(self) -> int:
        """Blocks side by side in a panel."""
        most = _STREAMED_LINES if self.streamed else _LINES
        return -(-self._blocks // -(-self._blocks // most))

    @property
    def _strips(self) -> int:
        return -(-self._blocks // self._panel)

    @property
    def _asks_ahead(self) -> bool:
        """Whether the operands are too large to be near."""
        return sum(o.bytes for o in self.plan.operands) > self.target.l2_bytes // 2

    @property
    def _asks_while_writing(self) -> bool:
        """Whether what comes next is asked for between writes, which take longest past the caches."""
        return bool(self.streamed) and all(not self._rows * t.bytes % _LINE_BYTES for t in self._tiles)

    # -- code ----------------------------------------------------------------------------------------------
    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module."""
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            if self.units:
                pointers = {k: f.arguments[name] for k, name in enumerate(self.pointers)}
                buffers = {
                    t.number: f.stack(t.element, self._rows * self._columns, align=_LINE_BYTES)
                    for t in self._tiles
                }
                emit_streaming(f, pointers, self.streamed, lambda streams: self._emit(f, buffers, streams))
        return ()

    def _emit(self, f: FunctionBuilder, buffers: dict[int, Value], streams: bool) -> None:
        plan, begin, end = self.plan, f.arguments["begin"], f.arguments["end"]
        pointers = {k: f.arguments[name] for k, name in enumerate(self.pointers)}
        start = Scope(f, plan, pointers, streamed=self.streamed if streams else frozenset())
        start.hoist(range(len(plan.nodes)), self._lanes)
        with f.loop(begin, end) as unit:
            scope, strip, row = self._panel_at(start, unit.i)
            scope.hoist(range(len(plan.nodes)), self._lanes)
            ahead = self._ahead(start, f.imin(f.iadd(unit.i, 1), f.isub(end, 1)))
            before = f.imul(strip, self._panel)
            with f.loop(0, f.imin(self._panel, f.isub(self._blocks, before))) as block:
                first = start_at = f.imul(f.iadd(before, block.i), self._columns)
                if plan.extents[self.crossing] % self._columns:  # the last block looks back, not past the end
                    start_at = f.imin(first, plan.extents[self.crossing] - self._columns)
                for tile in self._tiles:
                    reads = {} if self._asks_while_writing else ahead
                    self._pack(scope, tile, buffers[tile.number], start_at, row, reads, block.i)
                done = 0 if first is start_at else f.isub(first, start_at)
                with f.loop(done, self._columns) as column:
                    if self._asks_while_writing and ahead:
                        step = f.iadd(f.imul(block.i, self._columns), column.i)
                        for tile in self._tiles:
                            count = self._rows * tile.bytes // _LINE_BYTES
                            self._next(f, tile, ahead).ask(step, count)
                    at_column = scope.inside({self.crossing: f.iadd(start_at, column.i)})
                    at_column.hoist(range(len(plan.nodes)), self._lanes)
                    self._one_row(at_column, buffers, column.i, row, streams)

    def _panel_at(self, start: Scope, unit: Position) -> tuple[Scope, Position, Position]:
        """Where a panel is: a scope with its outer dims, the strip of panels, and its first row."""
        f = start.f
        rest = f.idiv(unit, self._row_blocks)
        row = f.imul(f.irem(unit, self._row_blocks), self._rows)
        strip = f.irem(rest, self._strips)
        outer = unflatten(f, f.idiv(rest, self._strips), self._outer, self.plan.extents)
        return start.inside(outer), strip, row

    def _ahead(self, start: Scope, unit: Position) -> dict[int, Value]:
        """The first element of each tile in the next panel, if it is asked for."""
        if not self._asks_ahead:
            return {}
        scope, strip, row = self._panel_at(start, unit)
        first = start.f.imul(strip, self._panel * self._columns)
        return {t.number: self._address(scope, t, first, row) for t in self._tiles}

    def _address(self, scope: Scope, tile: Tile, column: Position, row: Position) -> Value:
        f, last = scope.f, self.plan.rank - 1
        at = scope.inside({last: row, self.crossing: column}).position(tile.node.index)
        return f.offset(scope.pointers[tile.node.operand], at, tile.element)

    def _pack(
        self,
        scope: Scope,
        tile: Tile,
        buffer: Value,
        column: Position,
        row: Position,
        ahead: dict[int, Value],
        block: Position,
    ) -> None:
        """Fill a tile's buffer: of every few rows, registers whose pieces each hold one column.

        The registers of a group of rows follow each other; a group takes `columns * piece` elements.
        """
        f, extent, piece = scope.f, self.plan.extents[-1], tile.piece
        type_ = vector(tile.element, tile.lanes)
        left = self._rows if not extent % self._rows else f.imin(self._rows, f.isub(extent, row))
        corner = self._address(scope, tile, column, row)
        groups = f.idiv(f.iadd(left, piece - 1), piece)
        with f.loop(0, groups) as group:
            here = f.imul(group.i, piece)
            lines = [f.iadd(here, k) for k in range(piece)]
            if extent % piece:  # rows beyond the end repeat the last one
                lines = [f.imin(line, f.isub(left, 1)) for line in lines]
                rows = [f.offset(corner, f.imul(line, tile.step), tile.element) for line in lines]
            else:
                top = f.offset(corner, f.imul(here, tile.step), tile.element)
                rows = [f.offset(top, k * tile.step, tile.element) for k in range(piece)]
            if tile.number in ahead:
                step = f.iadd(f.imul(block, self._rows // piece), group.i)
                lines_of_group = piece * tile.columns * tile.bytes // _LINE_BYTES
                self._next(f, tile, ahead).ask(step, lines_of_group)
            into = f.offset(buffer, f.imul(group.i, tile.columns * piece), tile.element)
            for across in range(0, tile.columns, tile.lanes):
                loaded = [f.load(r, type_, across) for r in rows]
                for k, value in enumerate(within_pieces(f, loaded, piece)):
                    f.store(value, into, across * piece + k * tile.lanes, align=self.target.vector_bytes)

    def _next(self, f: FunctionBuilder, tile: Tile, ahead: dict[int, Value]) -> PanelAhead:
        return PanelAhead(f, tile, ahead[tile.number], self._panel * tile.columns)

    def _one_row(
        self, scope: Scope, buffers: dict[int, Value], column: Position, row: Position, streams: bool
    ) -> None:
        """One index of the crossing dim, for all indices of the last dim in a block."""
        f, plan, lanes, extent = scope.f, self.plan, self._lanes, self.plan.extents[-1]
        starts = {t.number: self._in_buffer(f, t, buffers[t.number], column) for t in self._tiles}
        unroll = 4 if self._moves else vectors_at_once(plan, self.target, stored_nodes(plan.stores))

        def vectors(numbers: Sequence[Position], mask: Value | None) -> None:
            parts = [Lanes(plan.rank - 1, f.iadd(row, f.imul(n, lanes)), lanes, mask) for n in numbers]
            given = [
                {t.number: self._gathered(f, t, starts[t.number], n) for t in self._tiles} for n in numbers
            ]
            self._write(scope, parts, given, streams)

        whole = self._rows // lanes

        def whole_block() -> None:
            for first in range(0, whole, unroll):
                vectors(range(first, min(whole, first + unroll)), None)

        if not extent % self._rows:
            whole_block()
            return
        left = f.index(f.isub(extent, row))
        with f.when(f.compare("sge", left, constant(self._rows, "i64"))):
            whole_block()
        with f.when(f.compare("slt", left, constant(self._rows, "i64"))):
            with f.loop(0, f.idiv(left, lanes)) as number:
                vectors([number.i], None)
            if extent % lanes:
                rest = f.splat(f.index(f.irem(left, lanes)), lanes)
                mask = f.compare("slt", f.lane_numbers(lanes, "i64"), rest)
                vectors([f.idiv(left, lanes)], mask)

    def _in_buffer(self, f: FunctionBuilder, tile: Tile, buffer: Value, column: Position) -> Value:
        """Where a column's first piece is."""
        piece, lanes = tile.piece, tile.lanes
        within = f.irem(column, piece)
        register = f.iadd(f.imul(f.idiv(column, lanes), lanes * piece), f.imul(within, lanes))
        inside = f.isub(f.irem(column, lanes), within)
        return f.offset(buffer, f.iadd(register, inside), tile.element)

    def _gathered(self, f: FunctionBuilder, tile: Tile, start: Value, number: Position) -> Value:
        """A vector along the last dim, from pieces of the groups that hold its rows; as it lies in memory."""
        piece, group = tile.piece, tile.columns * tile.piece
        if self._lanes < piece:  # a part of a piece
            parts = piece // self._lanes
            at = f.iadd(f.imul(f.idiv(number, parts), group), f.imul(f.irem(number, parts), self._lanes))
            return f.load(start, vector(tile.element, self._lanes), at)
        first = f.imul(number, self._lanes // piece * group)
        type_ = vector(tile.element, piece)
        parts_ = [
            f.load(start, type_, f.iadd(first, k * group), align=PIECE_BYTES)
            for k in range(self._lanes // piece)
        ]
        while len(parts_) > 1:
            size = len(parts_)
            lanes = self._lanes // size
            parts_ = [
                f.shuffle(a, b, range(2 * lanes)) for a, b in zip(parts_[::2], parts_[1::2], strict=True)
            ]
        return parts_[0]

    def _write(
        self, scope: Scope, parts: Sequence[Lanes], given: Sequence[dict[int, Value]], streams: bool
    ) -> None:
        """What the plan stores for vectors that follow each other along the last dim."""
        f, plan = scope.f, self.plan
        if not self._moves:
            inner = [scope.inside(lanes=part) for part in parts]
            for place, values in zip(inner, given, strict=True):
                for number, raw in values.items():
                    place.define(number, widen(f, raw, plan.nodes[number].dtype))
            store_all(inner)
            return
        for item in plan.stores:
            pointer = scope.pointers[item.operand]
            for part, values in zip(parts, given, strict=True):
                at = scope.inside({part.dim: part.start}).position(item.index)
                if part.mask is None:
                    past = streams and item.operand in self.streamed
                    f.store(values[item.node], pointer, at, streams=past)
                else:
                    f.masked_store(values[item.node], pointer, part.mask, at)

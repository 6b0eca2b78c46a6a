"""Kernels that add up over the outer dims: rows are read in their order, their sums stay in a line in L1.

Memory is fastest for whoever reads it in order; a strip of some columns down all rows is a new page with
every row.  So a kernel goes through whole rows, several at once (`far_rows`), and adds them to a line of
partial sums as long as a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.accumulate import identity, reduce_node, sum_dtype
from mpmd.compile.backends.native_cpu.emit.far_rows import (
    ask_ahead,
    far_rows,
    first_row,
    lines_to_come,
    rows_at_once,
)
from mpmd.compile.backends.native_cpu.emit.loop import stored_nodes
from mpmd.compile.backends.native_cpu.emit.nest import nested, unflatten, vector_loop
from mpmd.compile.backends.native_cpu.emit.operations import emit_combine
from mpmd.compile.backends.native_cpu.emit.parity import leaves_apart, scopes_apart, zipped
from mpmd.compile.backends.native_cpu.emit.partials import Partials
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.emit.row_pairs import add_pairs, in_order, raw_vectors, summed_loads
from mpmd.compile.backends.native_cpu.emit.scope import Scope, store_run
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.emit.together import evaluate, needed_nodes, vectors_at_once
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import load, store
from mpmd.compile.kernels.plan import ELEMENT, ROW, Load, store_level

_MOST_VECTORS = 2  # of each row, where there are several
_MOST_VECTORS_AHEAD = 4  # the same where lines are asked for ahead
_MOST_ROWS = 4  # with more than one vector


@dataclass(frozen=True)
class LineKernel(PlanKernel):
    """A kernel over a plan of kind `column` with row dims.

    A unit is a group of outer indices, or a panel of the columns of one, for one index of the batch dims.

    Attributes:
        partials: where the sums of each group are kept.
        panels: how many panels the last dim is cut into; more than one only where it is the only row dim and
            nothing happens once per row.
        streamed: numbers of the results that go past the caches.
    """

    partials: Partials
    panels: int = 1
    streamed: frozenset[int] = frozenset()

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand, then one per reduction for its partial sums."""
        return (*super().pointers, *self.partials.names)

    @property
    def units(self) -> int:
        """Panels of all groups."""
        return self.partials.batch * self.partials.groups * self.panels

    @cached_property
    def roots(self) -> list[int]:
        """Numbers of the nodes that are computed at every point."""
        plan = self.plan
        stored = stored_nodes([s for s in plan.stores if store_level(plan, s) == ELEMENT])
        return stored + [reduce_node(plan, n).arg for n in self.wide_sums]

    @property
    def wide_sums(self) -> list[int]:
        """Numbers of the reductions of elements."""
        plan = self.plan
        return [n for n in self.partials.reductions if plan.levels[reduce_node(plan, n).arg] == ELEMENT]

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Numbers of the loads whose even and odd lanes are taken apart."""
        return leaves_apart(self.plan, self.roots)

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """For each reduction of elements the load of bf16 that it adds up, if all do that and no more."""
        return summed_loads(self.plan, self.target, self.leaves, self.wide_sums)

    @cached_property
    def rows(self) -> int:
        """Rows that are read at once."""
        return rows_at_once(self.plan, self.target, self.roots, 4 * self.partials.line * len(self.wide_sums))

    @cached_property
    def vectors(self) -> int:
        """Vectors of each row, or pairs of them, that are computed together."""
        fitting = vectors_at_once(self.plan, self.target, self.roots)
        if self.rows == 1:
            return fitting
        if self.ahead:
            return min(fitting, _MOST_VECTORS_AHEAD)
        return 1 if self.rows > _MOST_ROWS else min(fitting, _MOST_VECTORS)

    @cached_property
    def ahead(self) -> list[Load]:
        """The loads whose lines are asked for ahead of time."""
        return lines_to_come(self.plan, self.target, self.roots)

    @property
    def panel(self) -> int:
        """Columns of a panel: whole rounds of vectors."""
        block = 2 * _MOST_VECTORS * 2 * self.target.lanes()
        return -(-self.plan.extents[-1] // (self.panels * block)) * block

    @property
    def leaves_no_row(self) -> bool:
        """Whether every group has whole rounds of rows; all but the last one have."""
        return self.partials.rows % self.rows == 0

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module."""
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            if self.units:
                lines = _Lines(self, f)
                emit_streaming(f, lines.pointers, self.streamed, lines.emit)
        return ()


class _Lines:
    """Emission of one line kernel."""

    def __init__(self, kernel: LineKernel, f: FunctionBuilder) -> None:
        self.kernel = kernel
        self.plan = kernel.plan
        self.parts = kernel.partials
        self.f = f
        self.lanes = kernel.target.lanes()
        self.pointers = {k: f.arguments[f"p{k}"] for k in range(len(self.plan.operands))}
        self.nodes = {n: reduce_node(self.plan, n) for n in kernel.wide_sums}
        self.element_stores = [s for s in self.plan.stores if store_level(self.plan, s) == ELEMENT]

    def emit(self, streams: bool) -> None:
        f, kernel, plan, parts = self.f, self.kernel, self.plan, self.parts
        start = Scope(f, plan, self.pointers, streamed=kernel.streamed if streams else frozenset())
        start.hoist(range(len(plan.nodes)), self.lanes)
        with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
            panel, rest = f.irem(unit.i, kernel.panels), f.idiv(unit.i, kernel.panels)
            group, batch = f.irem(rest, parts.groups), f.idiv(rest, parts.groups)
            line = parts.place(f, rest)
            first = f.imul(panel, kernel.panel)
            end = f.imin(f.iadd(first, kernel.panel), plan.extents[-1])
            low, high = (
                first_row(f, parts.rows, parts.groups, kernel.rows, g) for g in (group, f.iadd(group, 1))
            )
            scope = start.inside(unflatten(f, batch, range(plan.batch_dims), plan.extents))
            self._clear(line, first, end)

            def body(rows: list[Position], _: list[Value]) -> list[Value]:
                self._rows(scope, rows, line, first, end)
                return []

            far_rows(f, low, high, kernel.rows, (), body, whole=kernel.leaves_no_row)
            self._put_in_order(line, first, end)

    def _clear(self, line: Position, first: Position, end: Position) -> None:
        """Set the sums of a panel, or of a whole line, to the reductions' neutral values."""
        f, parts = self.f, self.parts
        one_panel = self.kernel.panels == 1
        low, high = (0, parts.line) if one_panel else (first, end)
        with f.loop(low, high, parts.lanes) as loop:
            for number in parts.reductions:
                node = reduce_node(self.plan, number)
                pointer = f.arguments[parts.name(number)]
                neutral = identity(node, parts.lanes)
                store(f, neutral, pointer, sum_dtype(node.dtype), f.iadd(line, loop.i))

    def _rows(
        self, start: Scope, numbers: Sequence[Position], line: Position, first: Position, end: Position
    ) -> None:
        """Add some rows to a line."""
        f, plan, kernel = self.f, self.plan, self.kernel
        needed = needed_nodes(plan, kernel.roots)
        rows = [start.inside(unflatten(f, number, plan.outer, plan.extents)) for number in numbers]
        for row in rows:
            row.hoist(needed, self.lanes)
        self._once_per_row(rows, line)
        runs = list(plan.row)[:-1]

        def run(indices: Mapping[int, Position], values: list[Value]) -> list[Value]:
            scopes = [row.inside(indices) for row in rows] if indices else rows
            for scope in scopes if indices else ():
                scope.hoist(needed, self.lanes)
            number: Position = 0
            for dim, index in indices.items():
                number = f.iadd(f.imul(number, plan.extents[dim]), index)
            self._columns(scopes, f.iadd(line, f.imul(number, self.parts.run)), first, end)
            return values

        nested(f, runs, plan.extents, (), run)

    def _once_per_row(self, rows: Sequence[Scope], line: Position) -> None:
        """Sums and stores of what does not change along a row."""
        f, plan, parts = self.f, self.plan, self.parts
        for number in parts.reductions:
            node = reduce_node(plan, number)
            if number in self.nodes:
                continue
            pointer, dtype = f.arguments[parts.name(number)], sum_dtype(node.dtype)
            total = load(f, pointer, dtype, 1, line)
            for row in rows:
                total = emit_combine(f, node.op, total, row.value(node.arg), node.dtype)
            store(f, total, pointer, dtype, line)
        for row in rows:
            for item in plan.stores:
                if store_level(plan, item) == ROW:
                    row.store(item)

    def _columns(self, rows: Sequence[Scope], line: Position, first: Position, end: Position) -> None:
        """Add some rows' runs of the last dim, or their panels, to the part of a line from `line` on."""
        f, kernel, extent = self.f, self.kernel, self.plan.extents[-1]
        last, paired = self.plan.rank - 1, self._paired

        def pairs(parts: list[Lanes], values: list[Value]) -> list[Value]:
            if kernel.summed:
                self._add_row_pairs(rows, parts, line)
            else:
                self._add(rows, parts, line, apart=True)
            return values

        def vectors(parts: list[Lanes], values: list[Value]) -> list[Value]:
            self._add(rows, parts, line, apart=False)
            return values

        if paired:
            high = f.imin(end, paired)
            vector_loop(
                f, last, first, high, paired, 2 * self.lanes, min(kernel.vectors, _MOST_VECTORS), (), pairs
            )
        if extent > paired:
            low = f.imax(first, paired) if paired else first
            unroll = 1 if paired else kernel.vectors
            vector_loop(f, last, low, end, extent, self.lanes, unroll, (), vectors)

    @property
    def _paired(self) -> int:
        """Columns whose even and odd ones are apart: whole pairs of vectors."""
        both = 2 * self.lanes
        return self.plan.extents[-1] // both * both if self.kernel.leaves else 0

    def _add(self, rows: Sequence[Scope], parts: Sequence[Lanes], line: Position, *, apart: bool) -> None:
        """Add some vectors of every row to the sums, and store what is stored at every point."""
        f, kernel = self.f, self.kernel
        scopes: list[list[Scope]] = []  # of each row, those of its vectors
        ask_ahead(rows, kernel.ahead, parts)
        for row in rows:
            if apart:
                scopes.append([s for part in parts for s in scopes_apart(row, kernel.leaves, part)])
            else:
                scopes.append([row.inside(lanes=part) for part in parts])
            evaluate(scopes[-1], kernel.roots)
            if kernel.ahead:
                f.keep_order()
        for number, node in self.nodes.items():
            pointer, dtype = f.arguments[self.parts.name(number)], sum_dtype(node.dtype)
            for v, own in enumerate(zip(*scopes, strict=True)):
                count = own[0].lanes.count if own[0].lanes else 1
                start = f.iadd(parts[0].start, v * count)
                terms = [scope.wide(node.arg) for scope in own]
                while len(terms) > 1:
                    pairs = zip(terms[::2], terms[1::2], strict=True)
                    terms = [emit_combine(f, node.op, a, b, node.dtype) for a, b in pairs]
                old = load(f, pointer, dtype, count, f.iadd(line, start))
                total = emit_combine(f, node.op, old, terms[0], node.dtype)
                store(f, total, pointer, dtype, f.iadd(line, start))
        for own_scopes in scopes:
            for item in self.element_stores:
                store_run(own_scopes, item)

    def _add_row_pairs(self, rows: Sequence[Scope], parts: Sequence[Lanes], line: Position) -> None:
        """Add pairs of vectors of every row to the sums, two rows at once."""
        f, plan = self.f, self.plan
        for number, source in zip(self.nodes, self.kernel.summed, strict=True):
            pointer, loaded = f.arguments[self.parts.name(number)], plan.nodes[source]
            assert isinstance(loaded, Load)
            raw = [raw_vectors(row, loaded, parts) for row in rows]
            for part, own in zip(parts, zip(*raw, strict=True), strict=True):
                places = [f.iadd(line, f.iadd(part.start, k * self.lanes)) for k in range(2)]
                low, high = (load(f, pointer, "f32", self.lanes, at) for at in places)
                for at, total in zip(places, add_pairs(f, own, low, high), strict=True):
                    store(f, total, pointer, "f32", at)

    def _put_in_order(self, line: Position, first: Position, end: Position) -> None:
        """Bring sums of pairs of vectors into the order of the columns."""
        f, parts, lanes = self.f, self.parts, self.lanes
        if not self._paired:
            return
        with f.loop(0, parts.line // parts.run) as run:
            start = f.iadd(line, f.imul(run.i, parts.run))
            with f.loop(first, f.imin(end, self._paired), 2 * lanes) as block:
                at = f.iadd(start, block.i)
                for number, node in self.nodes.items():
                    pointer, dtype = f.arguments[parts.name(number)], sum_dtype(node.dtype)
                    even = load(f, pointer, dtype, lanes, at)
                    odd = load(f, pointer, dtype, lanes, f.iadd(at, lanes))
                    ordered = in_order(f, even, odd) if self.kernel.summed else zipped(f, even, odd)
                    for half, value in enumerate(ordered):
                        store(f, value, pointer, dtype, f.iadd(at, half * lanes))

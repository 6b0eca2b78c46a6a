"""Kernels that walk over rows: reductions along a row, what uses them, and sums over the rows on the side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.accumulate import (
    Accumulators,
    identity,
    reduce_node,
    sum_dtype,
)
from mpmd.compile.backends.native_cpu.emit.nest import nested, unflatten, vector_loop
from mpmd.compile.backends.native_cpu.emit.operations import emit_combine
from mpmd.compile.backends.native_cpu.emit.partials import Partials
from mpmd.compile.backends.native_cpu.emit.passes import Pass
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.row_form import SCRATCH_BYTES, RowForm
from mpmd.compile.backends.native_cpu.emit.scope import Scope, store_run
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.emit.together import evaluate, needed_nodes
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value, lanes_of
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import load, store
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import ELEMENT, ROW, KernelPlan, store_arguments, store_level


@dataclass(frozen=True)
class RowKernel:
    """A kernel over a plan of kind `row` or `mixed`, or of kind `column` where row values are summed.

    A unit is a row, or, where the plan has column reductions, a group of rows with one line of partial sums.

    Attributes:
        name: its symbol.
        plan: what it computes.
        target: the CPU.
        partials: where the column reductions' partial sums are kept.
        streamed: numbers of the results that go past the caches.
    """

    name: str
    plan: KernelPlan
    target: CpuTarget
    partials: Partials | None = None
    streamed: frozenset[int] = frozenset()

    @cached_property
    def form(self) -> RowForm:
        """How its rows are walked over."""
        return RowForm(self.plan, self.target, self.partials)

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand, then one per column reduction for its partial sums."""
        sums = self.partials.names if self.partials else ()
        return (*(f"p{k}" for k in range(len(self.plan.operands))), *sums)

    @property
    def units(self) -> int:
        """Rows, or groups of rows."""
        return self.form.units

    @property
    def passes(self) -> list[Pass]:
        """What each walk over a row does."""
        return self.form.passes

    @property
    def workspace_bytes(self) -> int:
        """The scratch rows."""
        return self.form.workspace_bytes

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module."""
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            if self.units:
                rows, plainly = _Rows(self.form, f), frozenset[int]()
                emit_streaming(
                    f,
                    rows.pointers,
                    self.streamed,
                    lambda streams: rows.emit(self.streamed if streams else plainly),
                )
        return ()


class _Rows:
    """Emission of one row kernel."""

    def __init__(self, form: RowForm, f: FunctionBuilder) -> None:
        self.form = form
        self.plan = form.plan
        self.parts = form.partials
        self.f = f
        self.lanes = form.target.lanes() if self.plan.row_dims else 1
        self.pointers = {k: f.arguments[f"p{k}"] for k in range(len(self.plan.operands))}

    def emit(self, streamed: frozenset[int]) -> None:
        """All units of the call."""
        f, plan, parts = self.f, self.plan, self.parts
        start = Scope(f, plan, self.pointers, streamed=streamed)
        start.hoist(range(len(plan.nodes)), self.lanes)
        begin, end = f.arguments["begin"], f.arguments["end"]
        if parts is None:
            self._all_rows(start, range(plan.rank - plan.row_dims), begin, end, None)
            return
        with f.loop(begin, end) as unit:
            parts.clear(f, unit.i)
            batch, group = f.idiv(unit.i, parts.groups), f.irem(unit.i, parts.groups)
            low = f.imul(group, parts.rows_per_group)
            high = f.imin(f.iadd(low, parts.rows_per_group), parts.rows)
            inside = start.inside(unflatten(f, batch, range(plan.batch_dims), plan.extents))
            self._all_rows(inside, plan.outer, low, high, unit.i)

    # -- some rows -------------------------------------------------------------------------------------------
    def _all_rows(
        self, start: Scope, counted: Sequence[int], low: Position, high: Position, unit: Value | None
    ) -> None:
        """Rows `low` to `high`, a block of them at a time: each pass goes over all rows of a block."""
        f, count, extents = self.f, self.form.at_once, self.plan.extents

        with f.loop(low, high, count) as block:
            # the last block does its last row as often as it has too few
            last = f.isub(high, 1) if count > 1 else high
            numbers = [f.imin(f.iadd(block.i, k), last) if k else block.i for k in range(2 * count)]
            places = [unflatten(f, number, counted, extents) for number in numbers]
            rows = [start.inside(dims) for dims in places[:count]]
            for number in range(len(self.form.walks)):
                coming = places[count:] if self.form.coming.during(number) else []
                ahead = [start.inside(dims) for dims in coming]
                self._one_pass(start, rows, ahead, number, unit)
            self._finish_rows(rows, unit)

    def _one_pass(
        self, start: Scope, rows: Sequence[Scope], ahead: Sequence[Scope], number: int, unit: Value | None
    ) -> None:
        """One walk over the rows of a block; afterwards they know its reductions."""
        item = self.form.walks[number]
        needed = needed_nodes(self.plan, self.form.roots(item))
        for row in rows:
            row.hoist(needed, self.lanes)
            row.hoist_inverses(needed, self.lanes)
        if not self.plan.row_dims:  # a row of one point
            found = [self._single_point(row, item) for row in rows]
        else:
            found = _Walk(self, start, rows, ahead, number, unit).emit()
        for row, values in zip(rows, found, strict=True):
            for reduction, value in values.items():
                row.define(reduction, value)

    def _single_point(self, row: Scope, item: Pass) -> dict[int, Value]:
        sums = {n: row.value(reduce_node(self.plan, n).arg) for n in item.row_sums}
        for store_ in item.stores:  # after all values: a result may lie over an operand
            for number in store_arguments(store_):
                row.value(number)
        for store_ in item.stores:
            row.store(store_)
        return sums

    def _finish_rows(self, rows: Sequence[Scope], unit: Value | None) -> None:
        """What happens once per row, when its reductions are known; all values before any store."""
        stores = [s for s in self.plan.stores if store_level(self.plan, s) == ROW]
        for row in rows:
            for store_ in stores:
                for number in store_arguments(store_):
                    row.value(number)
        for row in rows:
            for store_ in stores:
                row.store(store_)
            if unit is not None:
                self._add_row_values(row, unit)

    def _add_row_values(self, row: Scope, unit: Value) -> None:
        """Column reductions of row values: one number per row."""
        plan, parts = self.plan, self.parts
        assert parts is not None
        for number in parts.reductions:
            node = reduce_node(plan, number)
            if plan.levels[node.arg] != ELEMENT:
                self.combine(number, parts.place(self.f, unit), row.value(node.arg))

    def combine(self, number: int, at: Position, value: Value) -> None:
        """Add to the partial sums of a column reduction."""
        f, node, parts = self.f, reduce_node(self.plan, number), self.parts
        assert parts is not None
        pointer, dtype = f.arguments[parts.name(number)], sum_dtype(node.dtype)
        old = load(f, pointer, dtype, lanes_of(value.type), at)
        store(f, emit_combine(f, node.op, old, value, node.dtype), pointer, dtype, at)


class _Walk:
    """One pass over the rows of a block, a round of vectors of every row after the other.

    Args:
        whole: the emission it belongs to.
        start: where no row is known.
        rows: where one row of the block is known each.
        ahead: the rows of the next block, if they are asked for meanwhile.
        number: which pass it is.
        unit: the line of partial sums, if there are any.
    """

    def __init__(
        self,
        whole: _Rows,
        start: Scope,
        rows: Sequence[Scope],
        ahead: Sequence[Scope],
        number: int,
        unit: Value | None,
    ) -> None:
        self.whole, self.form, self.f, self.plan = whole, whole.form, whole.f, whole.plan
        self.start, self.rows, self.ahead, self.unit = start, rows, ahead, unit
        self.number, self.item = number, self.form.walks[number]
        self.lanes = whole.lanes
        self.roots = self.form.roots(self.item)
        self.needed = needed_nodes(self.plan, self.roots)
        self.shared = self.form.shared(self.item)
        self.unroll = max(1, min(self.form.vectors_of_a_row(self.item), self.plan.extents[-1] // self.lanes))
        self.sums = Accumulators(self.f, self.plan, self.item.row_sums, self.lanes, self.unroll)

    def emit(self) -> list[dict[int, Value]]:
        """Write the loops; returns the row reductions that each row completes."""
        *runs, last = self.plan.row
        extent, count = self.plan.extents[last], len(self.sums.start)

        def run(indices: Mapping[int, Position], values: Sequence[Value]) -> list[Value]:
            scopes = [row.inside(indices) if indices else row for row in self.rows]
            for scope in scopes:
                scope.hoist(self.needed, self.lanes)
            common = self.start.inside(indices) if indices else self.start
            line = self.f.imul(self._run_number(indices), self.form.row_width)

            def body(parts: list[Lanes], carried: list[Value]) -> list[Value]:
                return self._round(common, scopes, line, parts, carried)

            return vector_loop(self.f, last, 0, extent, extent, self.lanes, self.unroll, values, body)

        values = nested(self.f, runs, self.plan.extents, self.sums.start * len(self.rows), run)
        return [self.sums.finish(values[k * count : (k + 1) * count]) for k in range(len(self.rows))]

    def _run_number(self, indices: Mapping[int, Position]) -> Position:
        total: Position = 0
        for dim, index in indices.items():
            total = self.f.iadd(self.f.imul(total, self.plan.extents[dim]), index)
        return total

    def _round(
        self, common: Scope, rows: Sequence[Scope], line: Position, parts: list[Lanes], carried: list[Value]
    ) -> list[Value]:
        """A round of vectors of each row, which starts `line` elements into lines of its length."""
        if len(parts) % 2 == 0 and self.form.takes_pairs(self.item):
            parts = [half for low in parts[::2] for half in low.halves()]
        shared = [common.inside(lanes=part) for part in parts]
        evaluate(shared, self.shared)
        scopes = [[row.inside(lanes=part) for part in parts] for row in rows]
        for number, row in enumerate(scopes):
            for part, known, inner in zip(parts, shared, row, strict=True):
                for n in self.shared:
                    inner.define(n, known.value(n))
                self._read(inner, part, self._kept_at(number, line))
        # all values before any store: a result may lie over an operand
        evaluate([inner for row in scopes for inner in row], self.roots)
        for number, row in enumerate(scopes):
            self._keep(row, parts, self._kept_at(number, line))
            for store_ in self.item.stores:
                store_run(row, store_)
        self._add_columns(scopes, parts, line)
        self.form.coming.ask(self.number, self.ahead, parts)
        count = len(self.sums.start)
        sums = [
            self.sums.add(list(zip(parts, row, strict=True)), carried[k * count : (k + 1) * count])
            for k, row in enumerate(scopes)
        ]
        return [value for row in sums for value in row]

    # -- what lies between passes ----------------------------------------------------------------------------
    def _kept_at(self, number: int, line: Position) -> Position:
        return self.f.iadd(number * self.form.scratch_size, line)

    def _start_of(self, part: Lanes) -> Position:
        """Where a vector is kept: the even ones of two, then the odd ones."""
        return self.f.iadd(part.start, part.count) if part.half == 1 else part.start

    def _scratch(self, number: int) -> Value:
        """The scratch rows of a node, one for each row of a block."""
        rows = self.form.kept[number] * self.form.at_once
        return self.f.offset(self.f.arguments["workspace"], rows * self.form.scratch_size * SCRATCH_BYTES)

    def _read(self, scope: Scope, part: Lanes, at: Position) -> None:
        """What earlier passes kept for one vector of a row."""
        for number in self.item.reads:
            dtype = sum_dtype(self.plan.nodes[number].dtype)
            place = self.f.iadd(at, self._start_of(part))
            scope.define(number, load(self.f, self._scratch(number), dtype, part.count, place))

    def _keep(self, row: Sequence[Scope], parts: Sequence[Lanes], at: Position) -> None:
        """What later passes read of one round of a row."""
        for number in self.item.keeps:
            dtype = sum_dtype(self.plan.nodes[number].dtype)
            for part, scope in zip(parts, row, strict=True):
                place = self.f.iadd(at, self._start_of(part))
                store(self.f, scope.wide(number), self._scratch(number), dtype, place)

    # -- sums over the rows ----------------------------------------------------------------------------------
    def _add_columns(self, scopes: Sequence[Sequence[Scope]], parts: Sequence[Lanes], line: Position) -> None:
        """The rows of a block are added up before their sum is added to the partial sums in memory."""
        f, lines = self.f, self.form.partials
        for number in self.item.column_sums:
            assert self.unit is not None and lines is not None
            node = reduce_node(self.plan, number)
            for u, part in enumerate(parts):
                values = [row[u].wide(node.arg) for row in scopes]
                while len(values) > 1:
                    pairs = zip(values[::2], values[1::2], strict=True)
                    values = [emit_combine(f, node.op, a, b, node.dtype) for a, b in pairs]
                value = values[0]
                if part.mask is not None:
                    value = f.select(part.mask, value, identity(node, part.count))
                place = f.iadd(lines.place(f, self.unit), f.iadd(line, part.start))
                self.whole.combine(number, place, value)

"""Kernels that walk over rows: reductions along a row, what uses them, and sums over the rows on the side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.accumulate import reduce_node
from mpmd.compile.backends.native_cpu.emit.coming_rows import PAGE
from mpmd.compile.backends.native_cpu.emit.nest import unflatten
from mpmd.compile.backends.native_cpu.emit.partials import Partials
from mpmd.compile.backends.native_cpu.emit.passes import Pass
from mpmd.compile.backends.native_cpu.emit.row_form import RowForm
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.emit.walk import Walk, add_to_partials, emit_walks
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant
from mpmd.compile.backends.native_cpu.shared import SharedFunction
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
        return RowForm(self.plan, self.target, self.partials, self.streamed)

    @cached_property
    def plain_form(self) -> RowForm:
        """The same where results do not begin at lines and therefore go through the caches."""
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
        return max(self.form.workspace_bytes, self.plain_form.workspace_bytes)

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module."""
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            if self.units:
                pointers = {k: f.arguments[f"p{k}"] for k in range(len(self.plan.operands))}

                def emit(streams: bool) -> None:
                    _Rows(self.form if streams else self.plain_form, f, pointers).emit()

                emit_streaming(f, pointers, self.streamed, emit)
        return ()


class _Rows:
    """Emission of one row kernel."""

    def __init__(self, form: RowForm, f: FunctionBuilder, pointers: dict[int, Value]) -> None:
        self.form = form
        self.plan = form.plan
        self.parts = form.partials
        self.f = f
        self.lanes = form.target.lanes() if self.plan.row_dims else 1
        self.pointers = pointers
        self.coming = form.coming.based(f, pointers)
        self.backwards = self._backwards()

    def emit(self) -> None:
        """All units of the call."""
        f, plan, parts = self.f, self.plan, self.parts
        start = Scope(f, plan, self.pointers, streamed=self.form.streamed)
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
        f, count = self.f, self.form.at_once

        def places(block: Position) -> list[dict[int, Position]]:
            """The rows of a block and of the next one; the last is there as often as there are too few."""
            last = f.isub(high, 1)
            numbers = [f.imin(f.iadd(block, k), last) if k else block for k in range(2 * count)]
            return [unflatten(f, number, counted, self.plan.extents) for number in numbers]

        if not self.form.overlapped:
            with f.loop(low, high, count) as block:
                here = places(block.i)
                rows = [start.inside(dims) for dims in here[:count]]
                for number in range(len(self.form.walks)):
                    coming = here[count:] if self.form.coming.during(number) else []
                    ahead = [start.inside(dims) for dims in coming]
                    self._passes([self._walk(start, rows, number, unit, ahead)])
                self._finish_rows(rows, unit)
            return
        with f.when(f.compare("slt", f.index(low), f.index(high))):
            rows = [start.inside(dims) for dims in places(low)[:count]]
            beside = self._walk(start, rows, self.form.overlapped, unit)
            # sums of every row are added up in the same order, wherever rows begin
            self._passes([replace(self._walk(start, rows, 0, unit), vectors=beside.unroll)])
            sums = self.form.walks[0].row_sums
            with f.loop(low, high, count, [row.value(n) for row in rows for n in sums]) as block:
                scopes = [start.inside(dims) for dims in places(block.i)]
                rows, following = scopes[:count], scopes[count:]
                for k, row in enumerate(rows):
                    for n, value in zip(sums, block.carried[k * len(sums) :], strict=False):
                        row.define(n, value)
                for number in range(1, len(self.form.walks)):
                    walk = self._walk(start, rows, number, unit, following)
                    if number != self.form.overlapped:
                        self._passes([walk])
                        continue
                    first = self._walk(start, following, 0, unit, following)
                    self._passes([walk, replace(first, vectors=walk.unroll)])
                self._finish_rows(rows, unit)
                block.carry([row.value(n) for row in following for n in sums])

    def _walk(
        self,
        start: Scope,
        rows: Sequence[Scope],
        number: int,
        unit: Value | None,
        ahead: Sequence[Scope] = (),
    ) -> Walk:
        walk = Walk(self.form, self.f, start, tuple(rows), tuple(ahead), number, unit, self.coming)
        return replace(walk, backwards=self.backwards) if number == len(self.form.walks) - 1 else walk

    def _backwards(self) -> Value | None:
        """Whether the last pass goes backwards; None if nothing is gained.

        A load waits for a store shortly before it to the same place in another page: where results begin a
        little further on in their pages than what is read, that is each load of the next round.
        """
        if not self.form.neighbours:
            return None
        f, found = self.f, list[Value]()
        for sign in (1, -1):
            near = constant(0, "i1")
            for written, read in self.form.neighbours:
                w, r = (f.op(f"ptrtoint ptr {self.pointers[k]} to i64", "i64") for k in (written, read))
                apart = f.sub(f.sub(w, r) if sign > 0 else f.sub(r, w), constant(1, "i64"))
                place = f.and_(apart, constant(PAGE - 1, "i64"))
                near = f.or_(near, f.compare("ult", place, constant(self.form.held_up - 1, "i64")))
            found.append(near)
        return f.and_(found[0], f.not_(found[1]))

    def _passes(self, walks: Sequence[Walk]) -> None:
        """Passes at the same time, each over the rows of a block; afterwards they know its reductions."""
        for walk in walks:
            for row in walk.rows:
                row.hoist(walk.needed, self.lanes)
                row.hoist_inverses(walk.needed, self.lanes)
        if self.plan.row_dims:
            found = emit_walks(walks)
        else:  # rows of one point
            found = [[self._single_point(row, walk.item) for row in walk.rows] for walk in walks]
        for walk, results in zip(walks, found, strict=True):
            for row, values in zip(walk.rows, results, strict=True):
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
                add_to_partials(self.f, parts, number, parts.place(self.f, unit), row.value(node.arg))

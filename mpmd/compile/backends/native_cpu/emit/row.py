"""Kernels that walk over rows: reductions along a row, what uses them, and sums over the rows on the side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.accumulate import Accumulators, identity, reduce_node, sum_dtype
from mpmd.compile.backends.native_cpu.emit.loop import stored_nodes
from mpmd.compile.backends.native_cpu.emit.nest import nested, product, unflatten, vector_loop
from mpmd.compile.backends.native_cpu.emit.operations import emit_combine
from mpmd.compile.backends.native_cpu.emit.partials import Partials
from mpmd.compile.backends.native_cpu.emit.passes import Pass, plan_passes
from mpmd.compile.backends.native_cpu.emit.scope import Lanes, Scope
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.emit.together import evaluate, vectors_at_once
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import load, store
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import ELEMENT, ROW, KernelPlan, store_arguments, store_level

_SCRATCH_BYTES = 8  # of every element kept in a scratch row, whatever its type


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

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand, then one per column reduction for its partial sums."""
        sums = self.partials.names if self.partials else ()
        return (*(f"p{k}" for k in range(len(self.plan.operands))), *sums)

    @property
    def units(self) -> int:
        """Rows, or groups of rows."""
        if self.partials:
            return self.partials.batch * self.partials.groups
        return product(self.plan.extents, range(self.plan.rank - self.plan.row_dims))

    @cached_property
    def passes(self) -> list[Pass]:
        """What each walk over a row does."""
        return plan_passes(self.plan)

    @cached_property
    def _kept(self) -> dict[int, int]:
        """Number of the scratch row of each kept node."""
        nodes = sorted({n for p in self.passes for n in p.keeps})
        return {node: k for k, node in enumerate(nodes)}

    @property
    def row_width(self) -> int:
        """Elements from one run of the last dim to the next in a scratch row: whole vectors."""
        lanes = self.target.lanes()
        return -(-self.plan.extents[-1] // lanes) * lanes if self.plan.row_dims else 1

    @property
    def scratch_size(self) -> int:
        """Elements of one scratch row."""
        runs = product(self.plan.extents, list(self.plan.row)[:-1])
        return runs * self.row_width

    @property
    def workspace_bytes(self) -> int:
        """The scratch rows."""
        return len(self._kept) * self.scratch_size * _SCRATCH_BYTES

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module."""
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            if self.units:
                rows = _Rows(self, f)
                emit_streaming(f, rows.pointers, self.streamed, rows.emit)
        return ()


class _Rows:
    """Emission of one row kernel."""

    def __init__(self, kernel: RowKernel, f: FunctionBuilder) -> None:
        self.kernel = kernel
        self.plan = kernel.plan
        self.f = f
        self.lanes = kernel.target.lanes() if self.plan.row_dims else 1
        self.pointers = {k: f.arguments[f"p{k}"] for k in range(len(self.plan.operands))}
        self.kept = kernel._kept

    def emit(self, streams: bool) -> None:
        f, plan, kernel = self.f, self.plan, self.kernel
        start = Scope(f, plan, self.pointers, streamed=kernel.streamed if streams else frozenset())
        start.hoist(range(len(plan.nodes)), self.lanes)
        outside = range(plan.rank - plan.row_dims)
        with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
            if kernel.partials is None:
                self._row(start.inside(unflatten(f, unit.i, outside, plan.extents)), None)
                return
            parts = kernel.partials
            parts.clear(f, unit.i)
            batch, group = f.idiv(unit.i, parts.groups), f.irem(unit.i, parts.groups)
            low = f.imul(group, parts.rows_per_group)
            high = f.imin(f.iadd(low, parts.rows_per_group), parts.rows)
            with f.loop(low, high) as row:
                dims = unflatten(f, batch, range(plan.batch_dims), plan.extents)
                dims.update(unflatten(f, row.i, plan.outer, plan.extents))
                self._row(start.inside(dims), unit.i)

    # -- one row ---------------------------------------------------------------------------------------------
    def _row(self, row: Scope, unit: Value | None) -> None:
        plan = self.plan
        row.hoist(range(len(plan.nodes)), self.lanes)
        for item in self.kernel.passes:
            if item.is_empty:
                continue
            for number, value in self._walk(row, item, unit).items():
                row.define(number, value)
            row.hoist(range(len(plan.nodes)), self.lanes)
        for store_ in plan.stores:
            if store_level(plan, store_) == ROW:
                row.store(store_)
        if unit is not None:
            self._add_row_values(row, unit)

    def _add_row_values(self, row: Scope, unit: Value) -> None:
        """Column reductions of row values: one number per row."""
        plan, parts = self.plan, self.kernel.partials
        assert parts is not None
        for number in parts.reductions:
            node = reduce_node(plan, number)
            if plan.levels[node.arg] != ELEMENT:
                self._combine(number, parts.place(self.f, unit), row.value(node.arg))

    def _combine(self, number: int, at: Position, value: Value) -> None:
        f, node, parts = self.f, reduce_node(self.plan, number), self.kernel.partials
        assert parts is not None
        pointer, dtype = f.arguments[parts.name(number)], sum_dtype(node.dtype)
        lanes = self.lanes if value.type.startswith("<") else 1
        old = load(f, pointer, dtype, lanes, at)
        store(f, emit_combine(f, node.op, old, value, node.dtype), pointer, dtype, at)

    # -- one walk over the row -------------------------------------------------------------------------------
    def _walk(self, row: Scope, item: Pass, unit: Value | None) -> dict[int, Value]:
        """Do one pass; returns the row reductions that it completes."""
        f, plan = self.f, self.plan
        if not plan.row_dims:  # a row of one point
            return self._single_point(row, item)
        *runs, last = plan.row
        unroll = self._unroll(item)
        sums = Accumulators(f, plan, item.row_sums, self.lanes, unroll)

        def run(indices: Mapping[int, Position], values: Sequence[Value]) -> list[Value]:
            scope = row.inside(indices) if indices else row
            scope.hoist(range(len(plan.nodes)), self.lanes)
            start = f.imul(self._run_number(indices), self.kernel.row_width)

            def body(parts: list[Lanes], carried: list[Value]) -> list[Value]:
                scopes = [(part, scope.inside(lanes=part)) for part in parts]
                for part, inner in scopes:
                    self._read(inner, part, item, start)
                # all values before any store: a result may lie over an operand
                evaluate([inner for _, inner in scopes], self._roots(item))
                for part, inner in scopes:
                    self._point(inner, part, item, start, unit)
                return sums.add(scopes, carried)

            extent = plan.extents[last]
            return vector_loop(f, last, 0, extent, extent, self.lanes, unroll, values, body)

        return sums.finish(nested(f, runs, plan.extents, sums.start, run))

    def _single_point(self, row: Scope, item: Pass) -> dict[int, Value]:
        sums = {n: row.value(reduce_node(self.plan, n).arg) for n in item.row_sums}
        for store_ in item.stores:  # after all values: a result may lie over an operand
            for number in store_arguments(store_):
                row.value(number)
        for store_ in item.stores:
            row.store(store_)
        return sums

    def _run_number(self, indices: Mapping[int, Position]) -> Position:
        f, number = self.f, 0
        total: Position = number
        for dim, index in indices.items():
            total = f.iadd(f.imul(total, self.plan.extents[dim]), index)
        return total

    def _roots(self, item: Pass) -> list[int]:
        """Numbers of the nodes that a pass is about."""
        reduced = [reduce_node(self.plan, n).arg for n in (*item.row_sums, *item.column_sums)]
        return [*stored_nodes(item.stores), *reduced, *item.keeps]

    def _read(self, scope: Scope, part: Lanes, item: Pass, start: Position) -> None:
        """What earlier passes kept for one vector of a row."""
        for number in item.reads:
            dtype, at = sum_dtype(self.plan.nodes[number].dtype), self.f.iadd(start, part.start)
            scope.define(number, load(self.f, self._scratch(number), dtype, part.count, at))

    def _point(self, scope: Scope, part: Lanes, item: Pass, start: Position, unit: Value | None) -> None:
        """What is written for one vector of a row."""
        f, plan = self.f, self.plan
        for number in item.keeps:
            dtype = sum_dtype(plan.nodes[number].dtype)
            store(f, scope.wide(number), self._scratch(number), dtype, f.iadd(start, part.start))
        for number in item.column_sums:
            node = reduce_node(plan, number)
            value = scope.wide(node.arg)
            if part.mask is not None:
                value = f.select(part.mask, value, identity(node, part.count))
            assert unit is not None and self.kernel.partials is not None
            line = self.kernel.partials.place(f, unit)
            self._combine(number, f.iadd(line, f.iadd(start, part.start)), value)
        for store_ in item.stores:
            scope.store(store_)

    def _scratch(self, number: int) -> Value:
        offset = self.kept[number] * self.kernel.scratch_size * _SCRATCH_BYTES
        return self.f.offset(self.f.arguments["workspace"], offset)

    def _unroll(self, item: Pass) -> int:
        """Vectors per round: enough to hide the latency of sums, few enough for the registers."""
        fitting = vectors_at_once(self.plan, self.kernel.target, self._roots(item), len(item.row_sums))
        return max(1, min(fitting, self.plan.extents[-1] // self.lanes))

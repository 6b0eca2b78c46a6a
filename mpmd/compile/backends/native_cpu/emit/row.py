"""Kernels that walk over rows: reductions along a row, what uses them, and sums over the rows on the side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.accumulate import (
    Accumulators,
    dot_factors,
    identity,
    reduce_node,
    sum_dtype,
)
from mpmd.compile.backends.native_cpu.emit.loop import stored_nodes
from mpmd.compile.backends.native_cpu.emit.nest import nested, product, unflatten, vector_loop
from mpmd.compile.backends.native_cpu.emit.operations import emit_combine
from mpmd.compile.backends.native_cpu.emit.partials import Partials
from mpmd.compile.backends.native_cpu.emit.passes import Pass, plan_passes
from mpmd.compile.backends.native_cpu.emit.scope import Lanes, Scope, store_run
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.emit.together import evaluate, needed_nodes, vectors_at_once
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY, load, store
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import ELEMENT, ROW, KernelPlan, Load, store_arguments, store_level

_MOST_ROWS = 4  # of a block
_MOST_DOTS = 12  # running sums of products, each of which takes longer than others to be added to
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
        return len(self._kept) * self.at_once * self.scratch_size * _SCRATCH_BYTES

    @cached_property
    def at_once(self) -> int:
        """Rows of a block.

        The end of a pass over a row is a chain of operations on one number, which the next pass waits for.
        With several rows in a block the next row's pass is under way meanwhile.  More than stay in L1 between
        passes are no gain.
        """
        plan = self.plan
        loads = [n for k, n in enumerate(plan.nodes) if isinstance(n, Load) and plan.levels[k] == ELEMENT]
        touched = {n.operand for n in loads}
        touched |= {s.operand for s in plan.stores if store_level(plan, s) == ELEMENT}
        each = sum(BYTES[plan.operands[k].dtype] for k in sorted(touched)) + 4 * len(self._kept)
        fitting = self.target.l1_bytes // 2 // max(1, plan.row_size * each)
        return max(1, min(_MOST_ROWS, fitting))

    def vectors_at_once(self, item: Pass) -> int:
        """Vectors of one round: enough to hide the latency of sums, few enough for the registers."""
        only_sums = not (item.column_sums or item.stores or item.keeps)
        if only_sums and all(dot_factors(self.target, self.plan, n) for n in item.row_sums):
            return max(1, _MOST_DOTS // max(1, len(item.row_sums)))
        return vectors_at_once(self.plan, self.target, self.roots(item), len(item.row_sums))

    def roots(self, item: Pass) -> list[int]:
        """Numbers of the nodes that a pass is about."""
        reduced = [reduce_node(self.plan, n).arg for n in (*item.row_sums, *item.column_sums)]
        return [*stored_nodes(item.stores), *reduced, *item.keeps]

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
        begin, end, parts = f.arguments["begin"], f.arguments["end"], kernel.partials
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
        f, plan, kernel = self.f, self.plan, self.kernel
        walks = [item for item in kernel.passes if not item.is_empty]
        count = kernel.at_once if len(walks) > 1 else 1
        if count == 1:
            with f.loop(low, high) as row:
                scope = start.inside(unflatten(f, row.i, counted, plan.extents))
                for item in walks:
                    self._one_pass(scope, item, 0, unit)
                self._finish_row(scope, unit)
            return
        totals = [n for item in walks for n in item.row_sums]
        stacks = {n: f.stack(MEMORY[self._dtype_of_sum(n)], count) for n in totals}
        with f.loop(low, high, count) as block:
            top = f.imin(f.iadd(block.i, count), high)
            for item in walks:
                with f.loop(block.i, top) as row:
                    scope = start.inside(unflatten(f, row.i, counted, plan.extents))
                    number = f.isub(row.i, block.i)
                    for n in totals[: totals.index(item.row_sums[0])] if item.row_sums else totals:
                        scope.define(n, load(f, stacks[n], self._dtype_of_sum(n), 1, number))
                    self._one_pass(scope, item, number, unit)
                    for n in item.row_sums:
                        store(f, scope.value(n), stacks[n], self._dtype_of_sum(n), number)
                    if item is walks[-1]:
                        self._finish_row(scope, unit)

    def _dtype_of_sum(self, number: int) -> str:
        return sum_dtype(reduce_node(self.plan, number).dtype)

    def _one_pass(self, row: Scope, item: Pass, number: Position, unit: Value | None) -> None:
        """One walk over a row, which has a number in its block; afterwards the row knows its reductions."""
        row.hoist(needed_nodes(self.plan, self.kernel.roots(item)), self.lanes)
        for reduction, value in self._walk(row, item, number, unit).items():
            row.define(reduction, value)

    def _finish_row(self, row: Scope, unit: Value | None) -> None:
        """What happens once per row, when its reductions are known."""
        for store_ in self.plan.stores:
            if store_level(self.plan, store_) == ROW:
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
    def _walk(self, row: Scope, item: Pass, number: Position, unit: Value | None) -> dict[int, Value]:
        """Do one pass; returns the row reductions that it completes."""
        f, plan, kernel = self.f, self.plan, self.kernel
        needed = needed_nodes(plan, kernel.roots(item))
        if not plan.row_dims:  # a row of one point
            return self._single_point(row, item)
        *runs, last = plan.row
        unroll = max(1, min(kernel.vectors_at_once(item), plan.extents[-1] // self.lanes))
        sums = Accumulators(f, plan, item.row_sums, self.lanes, unroll)

        def run(indices: Mapping[int, Position], values: Sequence[Value]) -> list[Value]:
            scope = row.inside(indices) if indices else row
            scope.hoist(needed, self.lanes)
            start = f.imul(self._run_number(indices), kernel.row_width)
            kept = f.iadd(f.imul(number, kernel.scratch_size), start)

            def body(parts: list[Lanes], carried: list[Value]) -> list[Value]:
                scopes = [(part, scope.inside(lanes=part)) for part in parts]
                for part, inner in scopes:
                    self._read(inner, part, item, kept)
                # all values before any store: a result may lie over an operand
                evaluate([inner for _, inner in scopes], kernel.roots(item))
                for part, inner in scopes:
                    self._point(inner, part, item, start, kept, unit)
                for store_ in item.stores:
                    store_run([inner for _, inner in scopes], store_)
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

    def _read(self, scope: Scope, part: Lanes, item: Pass, kept: Position) -> None:
        """What earlier passes kept for one vector of a row."""
        for number in item.reads:
            dtype, at = sum_dtype(self.plan.nodes[number].dtype), self.f.iadd(kept, part.start)
            scope.define(number, load(self.f, self._scratch(number), dtype, part.count, at))

    def _point(
        self, scope: Scope, part: Lanes, item: Pass, start: Position, kept: Position, unit: Value | None
    ) -> None:
        """What is written for one vector of a row."""
        f, plan = self.f, self.plan
        for number in item.keeps:
            dtype = sum_dtype(plan.nodes[number].dtype)
            store(f, scope.wide(number), self._scratch(number), dtype, f.iadd(kept, part.start))
        for number in item.column_sums:
            node = reduce_node(plan, number)
            value = scope.wide(node.arg)
            if part.mask is not None:
                value = f.select(part.mask, value, identity(node, part.count))
            assert unit is not None and self.kernel.partials is not None
            line = self.kernel.partials.place(f, unit)
            self._combine(number, f.iadd(line, f.iadd(start, part.start)), value)

    def _scratch(self, number: int) -> Value:
        """The scratch rows of a node, one for each row of a block."""
        rows = self.kept[number] * self.kernel.at_once
        return self.f.offset(self.f.arguments["workspace"], rows * self.kernel.scratch_size * _SCRATCH_BYTES)

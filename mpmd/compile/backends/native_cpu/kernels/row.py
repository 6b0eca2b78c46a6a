"""Kernels that iterate over rows: reductions along a row, what uses them, and sums over the rows.

A row plan passes over its row once per stage.  An expensive value that two passes need is written to a
scratch row by the first and read by the second; a cheap one is computed again, which usually means one more
load from L1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.kernels.loop import (
    evaluate,
    needed_nodes,
    stored_nodes,
    vectors_at_once,
)
from mpmd.compile.backends.native_cpu.kernels.operations import emit_combine
from mpmd.compile.backends.native_cpu.kernels.partials import (
    Accumulators,
    Partials,
    identity,
    reduce_node,
    sum_dtype,
)
from mpmd.compile.backends.native_cpu.kernels.places import Lanes, nested, product, unflatten, vector_loop
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import PlanKernel, emit_streaming
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.storage import load, store
from mpmd.compile.kernels.kernel_plan import (
    ELEMENT,
    ROW,
    Apply,
    KernelPlan,
    ReduceNode,
    Store,
    arguments,
    store_arguments,
    store_level,
)
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value, lanes_of

# A scratch row beyond this many bytes would not stay in L2.
_MAX_SCRATCH_BYTES = 256 << 10


@dataclass(frozen=True)
class RowPass:
    """One pass over a row.

    Attributes:
        row_sums: row reductions that are complete after it.
        column_sums: column reductions of elements that it adds to.
        stores: element stores that it does.
        keeps: elements that it writes to the scratch.
        reads: elements that it reads from the scratch.
    """

    row_sums: tuple[int, ...]
    column_sums: tuple[int, ...]
    stores: tuple[Store, ...]
    keeps: tuple[int, ...]
    reads: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.row_sums or self.column_sums or self.stores)


def plan_passes(plan: KernelPlan) -> list[RowPass]:
    """The passes over a row, in order."""
    count = max(plan.stages, default=0) + 1
    row_sums: list[list[int]] = [[] for _ in range(count)]
    column_sums: list[list[int]] = [[] for _ in range(count)]
    stores: list[list[Store]] = [[] for _ in range(count)]
    for number, node in enumerate(plan.nodes):
        if isinstance(node, ReduceNode) and node.axis == ROW:
            row_sums[plan.stages[node.arg]].append(number)
        elif isinstance(node, ReduceNode) and plan.levels[node.arg] == ELEMENT:
            column_sums[plan.stages[node.arg]].append(number)
    for item in plan.stores:
        if store_level(plan, item) == ELEMENT:
            stores[max(plan.stages[n] for n in store_arguments(item))].append(item)
    kept_by: dict[int, int] = {}  # node → the pass that computes it
    keeps: list[set[int]] = [set() for _ in range(count)]
    reads: list[set[int]] = [set() for _ in range(count)]
    seen: list[set[int]] = []
    for stage in range(count):
        roots = [_reduced(plan, n) for n in (*row_sums[stage], *column_sums[stage])]
        roots += [n for s in stores[stage] for n in store_arguments(s)]
        needed: set[int] = set()
        for root in roots:
            _visit(plan, root, seen, needed, kept_by, reads[stage])
        for number in sorted(reads[stage]):
            keeps[kept_by[number]].add(number)
        seen.append(needed)
    return [
        RowPass(
            tuple(row_sums[s]),
            tuple(column_sums[s]),
            tuple(stores[s]),
            tuple(sorted(keeps[s])),
            tuple(sorted(reads[s])),
        )
        for s in range(count)
    ]


def _reduced(plan: KernelPlan, number: int) -> int:
    node = plan.nodes[number]
    assert isinstance(node, ReduceNode)
    return node.arg


def _visit(
    plan: KernelPlan,
    number: int,
    seen: list[set[int]],
    needed: set[int],
    kept_by: dict[int, int],
    reads: set[int],
) -> None:
    """Note what computing a node in the current pass needs, stopping at what an earlier pass can keep."""
    if number in needed or number in reads or plan.levels[number] != ELEMENT:
        return
    # An element that an earlier pass computed is read from a scratch row if it is expensive, and nothing
    # before it is visited; else it is computed again, from arguments that may themselves be kept.
    first = next((s for s, nodes in enumerate(seen) if number in nodes), None)
    node = plan.nodes[number]
    if first is not None and isinstance(node, Apply) and _worth_keeping(plan, node):
        kept_by.setdefault(number, first)
        reads.add(number)
        return
    needed.add(number)
    for argument in arguments(node):
        # a finished reduction is a number of the row, defined after its pass
        if not isinstance(plan.nodes[argument], ReduceNode):
            _visit(plan, argument, seen, needed, kept_by, reads)


def _worth_keeping(plan: KernelPlan, node: Apply) -> bool:
    row_bytes = 4 * plan.row_size
    return OPERATIONS[node.op].is_expensive and row_bytes <= _MAX_SCRATCH_BYTES


_SCRATCH_BYTES = 8  # of every element kept in a scratch row, whatever its type


@dataclass(frozen=True)
class RowKernel(PlanKernel):
    """A kernel over a plan of kind `row` or `mixed`, or of kind `column` where row values are summed.

    A unit is a row, or, where the plan has column reductions, a group of rows with one line of partial sums.

    Attributes:
        partials: where the column reductions' partial sums are kept.
        streamed: numbers of the results that are written by non-temporal stores.
    """

    partials: Partials | None = None
    streamed: frozenset[int] = frozenset()

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand, then one per column reduction for its partial sums."""
        return (*super().pointers, *(self.partials.names if self.partials else ()))

    @property
    def units(self) -> int:
        """Rows, or groups of rows."""
        if self.partials:
            return self.partials.batch * self.partials.groups
        return product(self.plan.extents, range(self.plan.rank - self.plan.row_dims))

    @cached_property
    def passes(self) -> list[RowPass]:
        return [item for item in plan_passes(self.plan) if not item.is_empty]

    @cached_property
    def kept(self) -> dict[int, int]:
        nodes = sorted({n for item in self.passes for n in item.keeps})
        return {node: k for k, node in enumerate(nodes)}

    @property
    def run_width(self) -> int:
        """Elements from one run of the last dim to the next in a scratch row: whole vectors."""
        lanes = self.target.lanes()
        return -(-self.plan.extents[-1] // lanes) * lanes if self.plan.row_dims else 1

    @property
    def scratch_size(self) -> int:
        return product(self.plan.extents, list(self.plan.row)[:-1]) * self.run_width

    @property
    def workspace_bytes(self) -> int:
        return len(self.kept) * self.scratch_size * _SCRATCH_BYTES

    def emit_units(self, f: FunctionBuilder, pointers: dict[int, Value]) -> None:
        def emit(streams: bool) -> None:
            _Rows(self, f, pointers, self.streamed if streams else frozenset()).emit()

        emit_streaming(f, pointers, self.streamed, emit)


class _Rows:
    def __init__(
        self, kernel: RowKernel, f: FunctionBuilder, pointers: dict[int, Value], streamed: frozenset[int]
    ) -> None:
        self.kernel = kernel
        self.plan = kernel.plan
        self.parts = kernel.partials
        self.f = f
        self.lanes = kernel.target.lanes() if self.plan.row_dims else 1
        self.start = Scope(f, self.plan, pointers, streamed=streamed)

    def emit(self) -> None:
        f, plan, parts = self.f, self.plan, self.parts
        self.start.hoist(range(len(plan.nodes)), self.lanes)
        begin, end = f.arguments["begin"], f.arguments["end"]
        if parts is None:
            self._all_rows(self.start, range(plan.rank - plan.row_dims), begin, end, None)
            return
        with f.loop(begin, end) as unit:
            parts.clear(f, unit.i)
            batch, group = f.idiv(unit.i, parts.groups), f.irem(unit.i, parts.groups)
            low = f.imul(group, parts.rows_per_group)
            high = f.imin(f.iadd(low, parts.rows_per_group), parts.rows)
            inside = self.start.inside(unflatten(f, batch, range(plan.batch_dims), plan.extents))
            self._all_rows(inside, plan.outer, low, high, unit.i)

    def _all_rows(
        self, start: Scope, counted: Sequence[int], low: Position, high: Position, unit: Value | None
    ) -> None:
        with self.f.loop(low, high) as loop:
            row = start.inside(unflatten(self.f, loop.i, counted, self.plan.extents))
            for item in self.kernel.passes:
                totals = self._pass(row, item, unit) if self.plan.row_dims else self._single_point(row, item)
                for reduction, value in totals.items():
                    row.define(reduction, value)
            # What a row stores once, and adds to sums over rows, needs reductions of every pass.
            self._finish_row(row, unit)

    # -- one pass --------------------------------------------------------------------------------------------
    def _pass(self, row: Scope, item: RowPass, unit: Value | None) -> dict[int, Value]:
        """The loops of one pass; returns the row reductions that it completes."""
        f, plan, lanes = self.f, self.plan, self.lanes
        *runs, last = plan.row
        extent, roots = plan.extents[last], self._roots(item)
        needed = needed_nodes(plan, roots)
        row.hoist(needed, lanes)
        # Each vector of a round has sums of its own, which are registers, too.
        fitting = vectors_at_once(plan, self.kernel.target, roots, len(item.row_sums))
        unroll = max(1, min(fitting, extent // lanes))
        sums = Accumulators(f, plan, item.row_sums, lanes, unroll)

        def run(indices: Mapping[int, Position], carried: Sequence[Value]) -> list[Value]:
            scope = row.inside(indices) if indices else row
            scope.hoist(needed, lanes)
            line = f.imul(self._run_number(indices), self.kernel.run_width)

            def body(parts: list[Lanes], values: list[Value]) -> list[Value]:
                scopes = [scope.inside(lanes=part) for part in parts]
                self._round(scopes, parts, item, roots, line, unit)
                return sums.add(list(zip(parts, scopes, strict=True)), values)

            return vector_loop(f, last, 0, extent, extent, lanes, unroll, carried, body)

        return sums.finish(nested(f, runs, plan.extents, sums.start, run))

    def _roots(self, item: RowPass) -> list[int]:
        """Numbers of the nodes that a pass computes for others than itself."""
        reduced = [reduce_node(self.plan, n).arg for n in (*item.row_sums, *item.column_sums)]
        return [*stored_nodes(item.stores), *reduced, *item.keeps]

    def _run_number(self, indices: Mapping[int, Position]) -> Position:
        total: Position = 0
        for dim, index in indices.items():
            total = self.f.iadd(self.f.imul(total, self.plan.extents[dim]), index)
        return total

    def _round(
        self,
        scopes: Sequence[Scope],
        parts: Sequence[Lanes],
        item: RowPass,
        roots: Sequence[int],
        line: Position,
        unit: Value | None,
    ) -> None:
        """Some adjacent vectors of a row, whose run starts at `line` in scratch rows and partial sums."""
        f, nodes = self.f, self.plan.nodes
        for scope, part in zip(scopes, parts, strict=True):
            for number in item.reads:
                dtype, at = sum_dtype(nodes[number].dtype), f.iadd(line, part.start)
                scope.define(number, load(f, self._scratch(number), dtype, part.count, at))
        # all values before any store: a result may be in an operand's memory
        evaluate(scopes, roots)
        for scope, part in zip(scopes, parts, strict=True):
            for number in item.keeps:
                dtype, at = sum_dtype(nodes[number].dtype), f.iadd(line, part.start)
                store(f, scope.wide(number), self._scratch(number), dtype, at)
        for item_ in item.stores:
            for scope in scopes:
                scope.store(item_)
        for number in item.column_sums:
            assert unit is not None and self.parts is not None
            node, start = reduce_node(self.plan, number), f.iadd(self.parts.place(f, unit), line)
            for scope, part in zip(scopes, parts, strict=True):
                value = scope.wide(node.arg)
                # Masked lanes are garbage, not zero: a sum takes the neutral value for them.
                if part.mask is not None:
                    value = f.select(part.mask, value, identity(node, part.count))
                self._add_to_partials(number, f.iadd(start, part.start), value)

    def _scratch(self, number: int) -> Value:
        place = self.kernel.kept[number] * self.kernel.scratch_size * _SCRATCH_BYTES
        return self.f.offset(self.f.arguments["workspace"], place)

    def _single_point(self, row: Scope, item: RowPass) -> dict[int, Value]:
        row.hoist(needed_nodes(self.plan, self._roots(item)), self.lanes)
        sums = {n: row.value(reduce_node(self.plan, n).arg) for n in item.row_sums}
        for store_ in item.stores:  # after all values: a result may be in an operand's memory
            for number in store_arguments(store_):
                row.value(number)
        for store_ in item.stores:
            row.store(store_)
        return sums

    # -- the end of a row ------------------------------------------------------------------------------------
    def _finish_row(self, row: Scope, unit: Value | None) -> None:
        """What happens once per row, when its reductions are known; all values before any store."""
        plan = self.plan
        stores = [s for s in plan.stores if store_level(plan, s) == ROW]
        for store_ in stores:
            for number in store_arguments(store_):
                row.value(number)
        for store_ in stores:
            row.store(store_)
        if unit is None or self.parts is None:
            return
        for number in self.parts.reductions:  # of row values: one number per row
            node = reduce_node(plan, number)
            if plan.levels[node.arg] != ELEMENT:
                self._add_to_partials(number, self.parts.place(self.f, unit), row.value(node.arg))

    def _add_to_partials(self, number: int, at: Position, value: Value) -> None:
        f, parts, node = self.f, self.parts, reduce_node(self.plan, number)
        assert parts is not None
        pointer, dtype = f.arguments[parts.name(number)], sum_dtype(node.dtype)
        old = load(f, pointer, dtype, lanes_of(value.type), at)
        store(f, emit_combine(f, node.op, old, value, node.dtype), pointer, dtype, at)

"""Kernels that add up all elements of all rows: sums stay in registers until the last row.

A sum of the rows' sums is a sum of all elements, and nobody asks for the rows' own.  So several rows far
apart are read side by side (`far_rows`), which memory is fastest for, and no row ends with adding up lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.accumulate import Accumulators, reduce_node, sum_dtype
from mpmd.compile.backends.native_cpu.emit.far_rows import ask_ahead, far_rows, first_row, lines_to_come
from mpmd.compile.backends.native_cpu.emit.nest import nested, unflatten, vector_loop
from mpmd.compile.backends.native_cpu.emit.operations import emit_combine
from mpmd.compile.backends.native_cpu.emit.partials import Partials
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.emit.together import evaluate, needed_nodes, vectors_at_once
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import store
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import BATCH, ELEMENT, KernelPlan, Load, ReduceNode, arguments, store_level

_STREAMS = 4  # rows of all operands that are read side by side
_MOST_SUMS = 16  # registers


@dataclass(frozen=True)
class TotalKernel(PlanKernel):
    """A kernel over a plan of kind `mixed` whose reductions are sums over all elements.

    A unit is a group of rows, with one number per reduction as its partial sums.

    Attributes:
        partials: where the sums of each group are kept.
    """

    partials: Partials

    @staticmethod
    def suits(plan: KernelPlan, target: CpuTarget) -> bool:
        """Whether every result comes of sums over all elements, in types that sums are kept in, from memory.

        What the last cache holds is read one row after the other as fast.
        """
        if plan.kind != "mixed" or any(store_level(plan, s) != BATCH for s in plan.stores):
            return False
        if sum(o.bytes for o in plan.operands) < target.l3_bytes:
            return False
        totals = _row_sums(plan)
        inner = [k for k, n in enumerate(plan.nodes) if isinstance(n, ReduceNode) and k not in totals]
        used = [a for k, n in enumerate(plan.nodes) if k not in totals for a in arguments(n)]
        again = set(totals) & set(needed_nodes(plan, [reduce_node(plan, n).arg for n in inner]))
        wide = plan.extents[-1] >= target.lanes()
        return wide and sorted(inner) == sorted(totals.values()) and not again and not set(inner) & set(used)

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand, then one per reduction for its partial sums."""
        return (*super().pointers, *self.partials.names)

    @property
    def units(self) -> int:
        """All groups."""
        return self.partials.batch * self.partials.groups

    @cached_property
    def sums(self) -> dict[int, int]:
        """For each reduction over the outer dims that of a row which it adds up."""
        return _row_sums(self.plan)

    @cached_property
    def roots(self) -> list[int]:
        """Numbers of the nodes that are computed at every point."""
        return [reduce_node(self.plan, n).arg for n in self.sums.values()]

    @cached_property
    def rows(self) -> int:
        """Rows that are read at once."""
        needed = [self.plan.nodes[n] for n in needed_nodes(self.plan, self.roots)]
        outer = set(self.plan.outer)
        loads = {(n.operand, n.index) for n in needed if isinstance(n, Load) and n.index.dims() & outer}
        return max(1, _STREAMS // max(1, len(loads) * len(self.sums)))

    @cached_property
    def vectors(self) -> int:
        """Vectors of each row that are computed together."""
        most = min(_MOST_SUMS // (self.rows * len(self.sums)), self.plan.extents[-1] // self.target.lanes())
        return max(1, min(most, vectors_at_once(self.plan, self.target, self.roots)))

    @cached_property
    def ahead(self) -> list[Load]:
        """The loads whose lines are asked for ahead of time."""
        return lines_to_come(self.plan, self.target, self.roots, narrowest=1)

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module."""
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            if self.units:
                _Totals(self, f).emit()
        return ()


def _row_sums(plan: KernelPlan) -> dict[int, int]:
    """The sums of rows that are summed up, by the number of the sum over them."""
    found = dict[int, int]()
    for number, node in enumerate(plan.nodes):
        inner = plan.nodes[node.arg] if isinstance(node, ReduceNode) else None
        if (
            isinstance(node, ReduceNode)
            and isinstance(inner, ReduceNode)
            and plan.levels[inner.arg] == ELEMENT
        ):
            alike = inner.op == node.op == "add" and inner.dtype == node.dtype
            if alike and sum_dtype(node.dtype) == node.dtype:
                found[number] = node.arg
    return found


class _Totals:
    """Emission of one kernel."""

    def __init__(self, kernel: TotalKernel, f: FunctionBuilder) -> None:
        self.kernel, self.plan, self.f = kernel, kernel.plan, f
        self.lanes = kernel.target.lanes()
        self.needed = needed_nodes(kernel.plan, kernel.roots)
        self.sums = Accumulators(f, kernel.plan, list(kernel.sums.values()), self.lanes, kernel.vectors)

    def emit(self) -> None:
        f, kernel, plan, parts = self.f, self.kernel, self.plan, self.kernel.partials
        start = Scope(f, plan, {k: f.arguments[f"p{k}"] for k in range(len(plan.operands))})
        start.hoist(range(len(plan.nodes)), self.lanes)
        with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
            group, batch = f.irem(unit.i, parts.groups), f.idiv(unit.i, parts.groups)
            low, high = (
                first_row(f, parts.rows, parts.groups, kernel.rows, g) for g in (group, f.iadd(group, 1))
            )
            scope = start.inside(unflatten(f, batch, range(plan.batch_dims), plan.extents))

            def body(rows: list[Position], values: list[Value]) -> list[Value]:
                return self._rows(scope, rows, values)

            carried = self.sums.start * kernel.rows
            whole = parts.rows % kernel.rows == 0
            self._finish(unit.i, far_rows(f, low, high, kernel.rows, carried, body, whole=whole))

    def _rows(self, start: Scope, numbers: Sequence[Position], values: list[Value]) -> list[Value]:
        """Add some rows to the sums; the last rows are fewer, and go to the first ones."""
        f, plan, count = self.f, self.plan, len(self.sums.start)
        rows = [start.inside(unflatten(f, number, plan.outer, plan.extents)) for number in numbers]
        for row in rows:
            row.hoist(self.needed, self.lanes)
        *runs, last = plan.row
        extent, used = plan.extents[last], count * len(rows)

        def run(indices: Mapping[int, Position], carried: Sequence[Value]) -> list[Value]:
            inner = [row.inside(indices) for row in rows] if indices else rows
            for scope in inner if indices else ():
                scope.hoist(self.needed, self.lanes)

            def body(parts: list[Lanes], carried: list[Value]) -> list[Value]:
                return self._round(inner, parts, carried)

            return vector_loop(f, last, 0, extent, extent, self.lanes, self.kernel.vectors, carried, body)

        # sums of one row first: long sums of small numbers lose their last digits
        own = nested(f, runs, plan.extents, self.sums.start * len(rows), run)
        dtypes = [self.plan.nodes[n].dtype for n in self.sums.reductions for _ in range(self.sums.each)]
        dtypes *= len(rows)
        pairs = zip(values[:used], own, dtypes, strict=True)
        return [*(emit_combine(f, "add", total, sum_, dtype) for total, sum_, dtype in pairs), *values[used:]]

    def _round(self, rows: Sequence[Scope], parts: list[Lanes], values: list[Value]) -> list[Value]:
        """Add some vectors of every row."""
        kernel, count, found = self.kernel, len(self.sums.start), list[Value]()
        ask_ahead(rows, kernel.ahead, parts)
        scopes = [[row.inside(lanes=part) for part in parts] for row in rows]
        for own in scopes:
            evaluate(own, kernel.roots)
        for k, own in enumerate(scopes):
            pairs = list(zip(parts, own, strict=True))
            found += self.sums.add(pairs, values[k * count : (k + 1) * count])
        return found

    def _finish(self, unit: Value, values: Sequence[Value]) -> None:
        """Keep a group's sums."""
        f, kernel, parts, count = self.f, self.kernel, self.kernel.partials, len(self.sums.start)
        totals = [self.sums.finish(values[k * count : (k + 1) * count]) for k in range(kernel.rows)]
        for number, inner in kernel.sums.items():
            node, total = reduce_node(self.plan, number), totals[0][inner]
            for other in totals[1:]:
                total = emit_combine(f, node.op, total, other[inner], node.dtype)
            store(f, total, f.arguments[parts.name(number)], sum_dtype(node.dtype), parts.place(f, unit))

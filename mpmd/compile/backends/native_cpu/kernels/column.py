"""Kernels that add up over the outer dims: the sums of a strip of columns stay in registers.

For rows that are no wider than a strip, and for arrays that stay in a cache: a strip down the rows of a
larger array reads a new page with every row, and `row.py` reads whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.kernels.operations import emit_combine
from mpmd.compile.backends.native_cpu.kernels.partials import (
    Partials,
    final_inputs,
    finish_columns,
    identity,
    reduce_node,
    sum_dtype,
)
from mpmd.compile.backends.native_cpu.kernels.places import Lanes, product, unflatten
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.storage import BYTES, round_to, store
from mpmd.compile.kernels.kernel_plan import ELEMENT, KernelPlan, Load, store_arguments, store_level
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value, constant, vector_constant

_MAX_ACCUMULATORS = 16


@dataclass(frozen=True)
class ColumnKernel(PlanKernel):
    """A kernel over a plan of kind `column` whose reductions are all of elements.

    A unit is a strip of the last dim, of one index of the other row dims and of the batch dims, for one
    group of outer indices.  With one group the sums are final and no second kernel is needed.

    Attributes:
        partials: where the sums of each group are kept.
    """

    partials: Partials

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand, then the partial sums if there are several groups."""
        sums = self.partials.names if self.partials.groups > 1 else ()
        return (*super().pointers, *sums)

    @property
    def vectors(self) -> int:
        return strip_vectors(self.plan, self.target)

    @property
    def strips(self) -> int:
        """Strips of the last dim."""
        return -(-self.plan.extents[-1] // (self.vectors * self.target.lanes()))

    @property
    def units(self) -> int:
        runs = product(self.plan.extents, list(self.plan.row)[:-1])
        return self.partials.batch * runs * self.strips * self.partials.groups

    def emit_units(self, f: FunctionBuilder, pointers: dict[int, Value]) -> None:
        _Columns(self, f).emit(pointers)


def strip_vectors(plan: KernelPlan, target: CpuTarget) -> int:
    """Vectors in a strip: some lines, but no more than registers hold, nor than the row has."""
    reductions = len(Partials(plan, target, 1).reductions)
    narrowest = min((BYTES[n.dtype] for n in plan.nodes if isinstance(n, Load)), default=4)
    lines = 8 * max(1, 4 // max(2, narrowest))  # vectors of f32 lanes that fill eight lines
    most = max(1, min(lines, _MAX_ACCUMULATORS * target.vector_registers // 32 // max(1, reductions)))
    return min(most, -(-plan.extents[-1] // target.lanes()))


class _Columns:
    def __init__(self, kernel: ColumnKernel, f: FunctionBuilder) -> None:
        self.kernel = kernel
        self.plan = kernel.plan
        self.parts = kernel.partials
        self.f = f
        self.lanes = kernel.target.lanes()
        self.nodes = {n: reduce_node(self.plan, n) for n in self.parts.reductions}

    def emit(self, pointers: dict[int, Value]) -> None:
        f, kernel, plan = self.f, self.kernel, self.plan
        start = Scope(f, plan, pointers)
        start.hoist(range(len(plan.nodes)), self.lanes)
        runs = list(plan.row)[:-1]
        with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
            # Groups are the fastest dim of units: threads that take neighbouring units read different rows
            # of the same strip.
            group, rest = f.irem(unit.i, self.parts.groups), f.idiv(unit.i, self.parts.groups)
            strip, rest = f.irem(rest, kernel.strips), f.idiv(rest, kernel.strips)
            count = product(plan.extents, runs)
            run, batch = f.irem(rest, count), f.idiv(rest, count)
            dims = unflatten(f, batch, range(plan.batch_dims), plan.extents)
            dims.update(unflatten(f, run, runs, plan.extents))
            scope = start.inside(dims)
            scope.hoist(final_inputs(plan), self.lanes)
            self._strips(scope, batch, group, run, strip)

    def _strips(self, scope: Scope, batch: Position, group: Position, run: Position, strip: Position) -> None:
        """The full strip, or the one at the end of the last dim, which may be narrower and ragged."""
        f, kernel, extent = self.f, self.kernel, self.plan.extents[-1]
        width = kernel.vectors * self.lanes
        ragged = extent % width
        column = f.imul(strip, width)
        whole = extent // width
        if whole:
            with f.when(f.compare("slt", f.index(strip), constant(whole, "i64"))):
                self._strip(scope, batch, group, run, column, kernel.vectors, 0)
        if ragged:
            with f.when(f.compare("eq", f.index(strip), constant(whole, "i64"))):
                self._strip(scope, batch, group, run, column, -(-ragged // self.lanes), ragged % self.lanes)

    def _strip(
        self,
        scope: Scope,
        batch: Position,
        group: Position,
        run: Position,
        column: Position,
        vectors: int,
        tail: int,
    ) -> None:
        f, plan, parts = self.f, self.plan, self.parts
        mask = vector_constant([int(lane < tail) for lane in range(self.lanes)], "i1") if tail else None
        last = plan.rank - 1
        places = [
            Lanes(last, f.iadd(column, v * self.lanes), self.lanes, mask if v == vectors - 1 else None)
            for v in range(vectors)
        ]
        low = f.imul(group, parts.rows_per_group)
        high = f.imin(f.iadd(low, parts.rows_per_group), parts.rows)
        # All sums of the strip are carried by the loop, in registers: reductions × vectors, which
        # `strip_vectors` limits.
        neutral = [identity(node, self.lanes) for node in self.nodes.values() for _ in places]
        outer = scope.inside()
        with f.loop(low, high, carried=neutral) as row:
            at_row = outer.inside(unflatten(f, row.i, plan.outer, plan.extents))
            at_row.hoist(range(len(plan.nodes)), self.lanes)
            row.carry(self._one_row(at_row, places, row.carried))
        totals = list(row.carried)
        for v, place in enumerate(places):
            mine = {n: totals[k * vectors + v] for k, n in enumerate(self.nodes)}
            at = f.iadd(f.imul(run, parts.run), place.start)
            # With one group the sums are final here; else `CombineKernel` adds the groups' lines.
            if parts.groups > 1:
                line = parts.place(f, f.iadd(f.imul(batch, parts.groups), group))
                for number, node in self.nodes.items():
                    pointer = f.arguments[parts.name(number)]
                    store(f, mine[number], pointer, sum_dtype(node.dtype), f.iadd(line, at))
                continue
            rounded = {n: round_to(f, mine[n], node.dtype) for n, node in self.nodes.items()}
            finish_columns(scope, rounded, at, parts, self.lanes)

    def _one_row(self, row: Scope, places: Sequence[Lanes], totals: Sequence[Value]) -> list[Value]:
        f, plan, following = self.f, self.plan, list(totals)
        element_stores = [s for s in plan.stores if store_level(plan, s) == ELEMENT]
        scopes = [row.inside(lanes=place) for place in places]
        for v, (place, scope) in enumerate(zip(places, scopes, strict=True)):
            for k, node in enumerate(self.nodes.values()):
                value = scope.wide(node.arg)
                if place.mask is not None:
                    value = f.select(place.mask, value, identity(node, self.lanes))
                at = k * len(places) + v
                following[at] = emit_combine(f, node.op, following[at], value, node.dtype)
            for item in element_stores:
                for number in store_arguments(item):
                    scope.value(number)
            for item in element_stores:
                scope.store(item)
        return following

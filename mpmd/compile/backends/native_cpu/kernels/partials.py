"""Partial sums over the outer dims: who adds where, and the kernel that adds the partial sums up.

The outer dims are split into groups; each unit of the first kernel owns one line of partial sums and adds up
its group in order.  The split depends on the plan alone, so results do not depend on the number of threads.

A line is added up in accumulators of several vectors, so that their latency overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.kernels.operations import (
    emit_combine,
    extreme_number,
    leaves_nan_out,
    nan_among,
    no_nan,
    with_nan,
)
from mpmd.compile.backends.native_cpu.kernels.places import Lanes, product, unflatten
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.shared import SharedFunction, kernel_function
from mpmd.compile.backends.native_cpu.storage import BYTES, REGISTER, load, round_to, store
from mpmd.compile.kernels.kernel_plan import BATCH, COLUMN, KernelPlan, ReduceNode, store_level
from mpmd.compile.kernels.operations import REDUCTIONS
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value, constant, lanes_of, vector


def sum_dtype(dtype: str) -> str:
    """The dtype in which a reduction's partial results are kept in memory."""
    return "f32" if dtype in ("bf16", "f16") else dtype


def reduce_node(plan: KernelPlan, number: int) -> ReduceNode:
    node = plan.nodes[number]
    assert isinstance(node, ReduceNode)
    return node


def identity(node: ReduceNode, lanes: int) -> Value:
    return constant(REDUCTIONS[node.op].identity(node.dtype), vector(REGISTER[node.dtype], lanes))


class Accumulators:
    """The running values of the reductions of one pass over a row.

    For each reduction `unroll` vectors, and one scalar for the tail of targets without cheap masks; where
    maxima and minima leave NaN out, a mask of the NaN seen.

    Args:
        f: the function.
        plan: the plan.
        reductions: numbers of the reductions.
        lanes: elements of a vector.
        unroll: vectors of a round.
    """

    def __init__(
        self, f: FunctionBuilder, plan: KernelPlan, reductions: Sequence[int], lanes: int, unroll: int
    ) -> None:
        self.f = f
        self.nodes = {number: reduce_node(plan, number) for number in reductions}
        self.unroll = unroll
        self.each = unroll + 1
        self.start: list[Value] = []
        for node in self.nodes.values():
            self.start += [identity(node, lanes)] * unroll + [identity(node, 1)]
        self.masks: dict[int, int] = {}  # number of the value that is the mask of a reduction
        for number, node in self.nodes.items():
            type_ = vector(REGISTER[node.dtype], lanes)
            if leaves_nan_out(f, node.op, type_):
                self.masks[number] = len(self.start)
                self.start.append(no_nan(type_))

    def add(self, scopes: Sequence[tuple[Lanes, Scope]], values: Sequence[Value]) -> list[Value]:
        """The values after one round of vectors."""
        f, result = self.f, list(values)
        for k, (number, node) in enumerate(self.nodes.items()):
            round_values = []
            for u, (part, scope) in enumerate(scopes):
                value = scope.wide(node.arg)
                if part.mask is not None:
                    value = f.select(part.mask, value, identity(node, part.count))
                at = k * self.each + (self.unroll if part.count == 1 else u)
                if number in self.masks:
                    result[at] = extreme_number(f, node.op, result[at], value)
                else:
                    result[at] = emit_combine(f, node.op, result[at], value, node.dtype)
                round_values.append(value)
            if number in self.masks:
                result[self.masks[number]] = nan_among(f, result[self.masks[number]], round_values)
        return result

    def finish(self, values: Sequence[Value]) -> dict[int, Value]:
        f, results = self.f, {}
        for k, (number, node) in enumerate(self.nodes.items()):

            def combine(a: Value, b: Value, node: ReduceNode = node) -> Value:
                return emit_combine(f, node.op, a, b, node.dtype)

            *vectors, scalar = values[k * self.each : (k + 1) * self.each]
            while len(vectors) > 1:
                vectors = [combine(vectors[0], vectors[1]), *vectors[2:]]
            total = f.lane_fold(vectors[0], combine) if lanes_of(vectors[0].type) > 1 else vectors[0]
            if not f.target.mask_registers:
                total = combine(total, scalar)
            if number in self.masks:
                total = with_nan(f, values[self.masks[number]], total)
            results[number] = round_to(f, total, node.dtype)
        return results


@dataclass(frozen=True)
class Partials:
    """The partial sums of one plan.

    Attributes:
        plan: the plan.
        target: the CPU.
        groups: groups of outer indices per batch index.
    """

    plan: KernelPlan
    target: CpuTarget
    groups: int

    @property
    def reductions(self) -> tuple[int, ...]:
        nodes = enumerate(self.plan.nodes)
        return tuple(k for k, n in nodes if isinstance(n, ReduceNode) and n.axis == COLUMN)

    @property
    def batch(self) -> int:
        return product(self.plan.extents, range(self.plan.batch_dims))

    @property
    def rows(self) -> int:
        return product(self.plan.extents, self.plan.outer)

    @property
    def rows_per_group(self) -> int:
        """Outer indices of a group; the last one may have fewer, or none."""
        return -(-self.rows // self.groups)

    @property
    def is_wide(self) -> bool:
        """Whether anything final changes along the row dims; otherwise every line is one number."""
        plan = self.plan
        levels = [plan.levels[n] for n in self.reductions] + [store_level(plan, s) for s in plan.stores]
        # A sum of row values has one number per line, though the rows are long.
        return plan.row_dims > 0 and COLUMN in levels

    @property
    def lanes(self) -> int:
        return self.target.lanes() if self.is_wide else 1

    @property
    def run(self) -> int:
        """Elements from one run of the last row dim to the next: whole vectors."""
        # Runs are padded to whole vectors, so that lines are cleared, added to and combined without masks.
        return -(-self.plan.extents[-1] // self.lanes) * self.lanes if self.is_wide else 1

    @property
    def line(self) -> int:
        return self.run * product(self.plan.extents, list(self.plan.row)[:-1]) if self.is_wide else 1

    def name(self, number: int) -> str:
        """Name of the pointer to the partial sums of a reduction."""
        return f"sums{number}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.name(n) for n in self.reductions)

    def bytes_of(self, number: int) -> int:
        dtype = sum_dtype(reduce_node(self.plan, number).dtype)
        return self.batch * self.groups * self.line * BYTES[dtype]

    def place(self, f: FunctionBuilder, unit: Position) -> Position:
        """Where the line of a unit starts."""
        return f.imul(unit, self.line)

    def clear(self, f: FunctionBuilder, unit: Value) -> None:
        """Set the line of a unit to the reductions' neutral values."""
        start = self.place(f, unit)
        with f.loop(0, self.line, self.lanes) as loop:
            for number in self.reductions:
                node = reduce_node(self.plan, number)
                at = f.iadd(start, loop.i)
                store(
                    f, identity(node, self.lanes), f.arguments[self.name(number)], sum_dtype(node.dtype), at
                )


@dataclass(frozen=True)
class CombineKernel:
    """Adds the partial sums up and computes the values that depend on them.

    A unit is one vector of the row dims of one batch index.
    """

    name: str
    partials: Partials

    @property
    def pointers(self) -> tuple[str, ...]:
        """As the first kernel's."""
        plan = self.partials.plan
        return (*(f"p{k}" for k in range(len(plan.operands))), *self.partials.names)

    @property
    def units(self) -> int:
        return self.partials.batch * (self.partials.line // self._lanes)

    @property
    def _lanes(self) -> int:
        return self.partials.lanes

    @property
    def workspace_bytes(self) -> int:
        return 0

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        parts, plan = self.partials, self.partials.plan
        with kernel_function(module, self) as f:
            pointers = {k: f.arguments[f"p{k}"] for k in range(len(plan.operands))}
            start = Scope(f, plan, pointers)
            start.hoist(final_inputs(plan), self._lanes)
            vectors = parts.line // self._lanes
            with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
                batch, vector_number = f.idiv(unit.i, vectors), f.irem(unit.i, vectors)
                at = f.imul(vector_number, self._lanes)
                totals = self._totals(f, batch, at)
                dims = unflatten(f, batch, range(plan.batch_dims), plan.extents)
                finish_columns(start.inside(dims), totals, at, parts, self._lanes)
        return ()

    def _totals(self, f: FunctionBuilder, batch: Position, at: Position) -> dict[int, Value]:
        parts = self.partials
        nodes = {n: reduce_node(parts.plan, n) for n in parts.reductions}
        # a sum of row values is one number: the first of its line
        lanes = {n: self._lanes if parts.plan.levels[n] == COLUMN else 1 for n in nodes}
        # Groups are added in order, and each began with the neutral value: the result is the same however
        # many threads computed them.
        neutral = [identity(node, lanes[number]) for number, node in nodes.items()]
        with f.loop(0, parts.groups, carried=neutral) as group:
            place = parts.place(f, f.iadd(f.imul(batch, parts.groups), group.i))
            following = []
            for (number, node), total in zip(nodes.items(), group.carried, strict=True):
                pointer, wide = f.arguments[parts.name(number)], lanes[number]
                where = f.iadd(place, at) if parts.plan.levels[number] == COLUMN else place
                value = load(f, pointer, sum_dtype(node.dtype), wide, where)
                following.append(emit_combine(f, node.op, total, value, node.dtype))
            group.carry(following)
        # Rounded once, at the end: partial sums of bf16 and f16 are f32.
        return {
            number: round_to(f, total, node.dtype)
            for (number, node), total in zip(nodes.items(), group.carried, strict=True)
        }


def final_inputs(plan: KernelPlan) -> list[int]:
    """Nodes that values over the outer dims are made of, the reductions left out."""
    return [k for k in range(len(plan.nodes)) if not plan.depends[k] & set(plan.outer)]


def finish_columns(scope: Scope, totals: dict[int, Value], at: Position, parts: Partials, lanes: int) -> None:
    """Store the values that depend on finished column reductions, for one vector at an offset into a line."""
    f, plan = scope.f, parts.plan
    for number, value in totals.items():
        if plan.levels[number] == BATCH:
            scope.define(number, value)
    once = [s for s in plan.stores if store_level(plan, s) == BATCH]
    # Values that do not change along the row are stored by the unit of its first vector, but computed in
    # front of the branch, where the others find them.
    if once:
        for item in once:
            scope.value(item.node)
        with f.when(f.compare("eq", f.index(at), constant(0, "i64"))):
            for item in once:
                scope.store(item)
    if not parts.is_wide:
        return
    *runs, last = plan.row
    run, column = f.idiv(at, parts.run), f.irem(at, parts.run)
    mask = None
    if plan.extents[last] % lanes:
        left = f.splat(f.index(f.isub(plan.extents[last], column)), lanes)
        mask = f.compare("slt", f.lane_numbers(lanes, "i64"), left)
    inner = scope.inside(unflatten(f, run, runs, plan.extents)).inside(lanes=Lanes(last, column, lanes, mask))
    for number, value in totals.items():
        if plan.levels[number] == COLUMN:
            inner.define(number, value)
    for item in plan.stores:
        if store_level(plan, item) == COLUMN:
            inner.store(item)

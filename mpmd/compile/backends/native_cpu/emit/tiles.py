"""Kernels without reductions that read an array across its rows: squares are transposed in registers.

Along the last dim, where results are written, such an array steps by more than one element; along another
dim, the crossing dim, it steps by one.  A square of both dims is read along the crossing dim, transposed,
put on the stack, and from there read along the last dim like everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.emit.loop import meets_itself, store_all
from mpmd.compile.backends.native_cpu.emit.nest import product, unflatten
from mpmd.compile.backends.native_cpu.emit.scope import Lanes, Scope
from mpmd.compile.backends.native_cpu.gemm.packing import transpose
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value, vector
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import MEMORY, load
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import KernelPlan, Load


def crossing_dim(plan: KernelPlan) -> int | None:
    """The dim along which arrays that cross the last dim are contiguous, or None if no array crosses it."""
    if plan.rank < 2 or meets_itself(plan):
        return None
    last = plan.rank - 1
    for node in plan.nodes:
        if isinstance(node, Load) and _crosses(node, last):
            dims = [d for d in range(last) if node.index.factor(d) == 1 and node.index.is_linear_in(d)]
            if dims:
                return dims[-1]
    return None


def _crosses(node: Load, last: int) -> bool:
    plain = node.where < 0 and not node.index.values() and node.index.is_linear_in(last)
    return plain and abs(node.index.factor(last)) > 1


@dataclass(frozen=True)
class TileKernel:
    """A kernel over a plan of kind `loop` with a crossing dim.

    A unit is a band of the crossing dim, as wide as a vector, of one index of the dims other than it and the
    last.
    """

    name: str
    plan: KernelPlan
    target: CpuTarget
    crossing: int

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand."""
        return tuple(f"p{k}" for k in range(len(self.plan.operands)))

    @property
    def workspace_bytes(self) -> int:
        """Nothing is kept."""
        return 0

    @property
    def _outer(self) -> list[int]:
        return [d for d in range(self.plan.rank - 1) if d != self.crossing]

    @property
    def _bands(self) -> int:
        return -(-self.plan.extents[self.crossing] // self.target.lanes())

    @property
    def units(self) -> int:
        """Bands of everything."""
        return product(self.plan.extents, self._outer) * self._bands if self.plan.size else 0

    @property
    def _tiles(self) -> list[int]:
        """Numbers of the loads that are transposed."""
        plan, last = self.plan, self.plan.rank - 1
        return [
            k
            for k, n in enumerate(plan.nodes)
            if isinstance(n, Load)
            and _crosses(n, last)
            and n.index.factor(self.crossing) == 1
            and n.index.is_linear_in(self.crossing)
        ]

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module."""
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            if self.units:
                self._emit(f)
        return ()

    def _emit(self, f: FunctionBuilder) -> None:
        plan, lanes = self.plan, self.target.lanes()
        last = plan.rank - 1
        start = Scope(f, plan, {k: f.arguments[name] for k, name in enumerate(self.pointers)})
        start.hoist(range(len(plan.nodes)), lanes)
        stacks = {k: f.stack(MEMORY[plan.nodes[k].dtype], lanes * lanes) for k in self._tiles}
        with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
            dims = unflatten(f, f.idiv(unit.i, self._bands), self._outer, plan.extents)
            scope = start.inside(dims)
            scope.hoist(range(len(plan.nodes)), lanes)
            first = f.imul(f.irem(unit.i, self._bands), lanes)
            high = f.imin(f.iadd(first, lanes), plan.extents[self.crossing])
            with f.loop(0, plan.extents[last], lanes) as column:
                for number, stack in stacks.items():
                    self._transpose(scope, number, stack, first, column.i)
                with f.loop(first, high) as row:
                    self._row(scope.inside({self.crossing: row.i}), stacks, f.isub(row.i, first), column.i)

    def _transpose(self, scope: Scope, number: int, stack: Value, first: Position, column: Position) -> None:
        """One square onto the stack: lanes of the last dim beyond its end repeat its last index."""
        f, plan, lanes = scope.f, self.plan, self.target.lanes()
        node = plan.nodes[number]
        assert isinstance(node, Load)
        last, extent = plan.rank - 1, plan.extents[self.crossing]
        type_ = vector(MEMORY[node.dtype], lanes)
        mask = None
        if extent % lanes:
            left = f.splat(f.index(f.isub(extent, first)), lanes)
            mask = f.compare("slt", f.lane_numbers(lanes, "i64"), left)
        pointer, rows = scope.pointers[node.operand], []
        for lane in range(lanes):
            index = f.imin(f.iadd(column, lane), plan.extents[last] - 1)
            at = scope.inside({last: index, self.crossing: first}).position(node.index)
            row = f.load(pointer, type_, at) if mask is None else f.masked_load(pointer, type_, mask, at)
            rows.append(row)
        for k, value in enumerate(transpose(f, rows)):
            f.store(value, stack, k * lanes)

    def _row(self, scope: Scope, stacks: dict[int, Value], row: Position, column: Position) -> None:
        """One row of the square, everything along the last dim."""
        f, plan, lanes = scope.f, self.plan, self.target.lanes()
        last, extent = plan.rank - 1, plan.extents[-1]
        scope.hoist(range(len(plan.nodes)), lanes)
        mask = None
        if extent % lanes:
            left = f.splat(f.index(f.isub(extent, column)), lanes)
            mask = f.compare("slt", f.lane_numbers(lanes, "i64"), left)
        inner = scope.inside(lanes=Lanes(last, column, lanes, mask))
        for number, stack in stacks.items():
            inner.define(number, load(f, stack, plan.nodes[number].dtype, lanes, f.imul(row, lanes)))
        store_all([inner])

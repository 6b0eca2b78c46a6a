"""Kernels without reductions: every point of the space on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.ahead import Ahead, RunAhead, rows_ahead, run_ahead
from mpmd.compile.backends.native_cpu.emit.nest import (
    Order,
    order_between,
    ordered_loop,
    product,
    shuffled_order,
    unflatten,
    vector_loop,
)
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.emit.scope import Scope, store_run
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.emit.together import evaluate, needed_nodes, vectors_at_once
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import Apply, KernelPlan, Load, Node, Store, store_arguments

# Enough units for load balance among many threads, each long enough that starting it costs nothing.
_WANTED_UNITS = 64
_SHORTEST_UNIT = 2048
_VECTORS_BETWEEN_CLAIMS = 2


@dataclass(frozen=True)
class LoopKernel(PlanKernel):
    """A kernel over a plan of kind `loop` that never writes a place twice.

    A unit is one index of all dims but the last, or a piece of the last one.

    Attributes:
        streamed: numbers of the results that go past the caches.
    """

    streamed: frozenset[int] = frozenset()

    @property
    def _outer(self) -> int:
        return product(self.plan.extents, range(self.plan.rank - 1))

    @property
    def _piece(self) -> int:
        """Elements of the last dim that one unit does."""
        plan = self.plan
        if not plan.rank:
            return 1
        extent = plan.extents[-1]
        pieces = max(1, min(_WANTED_UNITS // max(self._outer, 1), extent // _SHORTEST_UNIT))
        block = self._writer.unroll * self._lanes
        return max(1, -(-extent // (pieces * block)) * block)

    @property
    def _pieces(self) -> int:
        return -(-self.plan.extents[-1] // self._piece) if self.plan.rank else 1

    @property
    def units(self) -> int:
        """Independent parts of the work."""
        return self._outer * self._pieces if self.plan.size else 0

    @cached_property
    def _lanes(self) -> int:
        """Elements of a vector: those of f32, or, where nothing is computed, a whole register of them."""
        plan = self.plan
        moved = [plan.nodes[n] for n in stored_nodes(plan.stores)]
        if not plan.rank or not all(_is_run(plan, n) for n in moved):
            return self.target.lanes()
        return max(self.target.lanes(), self.target.vector_bytes // max(BYTES[n.dtype] for n in moved))

    @cached_property
    def _writer(self) -> RowWriter:
        fitting = vectors_at_once(self.plan, self.target, stored_nodes(self.plan.stores))
        run = run_ahead(self.plan, self.target, self.streamed)
        return RowWriter(self.plan, self._lanes, fitting, rows_ahead(self.plan, self.target), run)

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the kernel to a module."""
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            begin, end = f.arguments["begin"], f.arguments["end"]
            pointers = {k: f.arguments[name] for k, name in enumerate(self.pointers)}
            emit_streaming(f, pointers, self.streamed, lambda streams: self._emit(f, begin, end, streams))
        return ()

    def _emit(self, f: FunctionBuilder, begin: Value, end: Value, streams: bool) -> None:
        plan = self.plan
        pointers = {k: f.arguments[name] for k, name in enumerate(self.pointers)}
        start = Scope(f, plan, pointers, streamed=self.streamed if streams else frozenset())
        if not plan.size:
            return
        lanes = self._lanes if plan.rank else 1
        start.hoist(range(len(plan.nodes)), lanes)
        last, outer_dims, writer = plan.rank - 1, range(plan.rank - 1), self._writer
        order = writer.order(f, 0, plan.extents[-1]) if plan.rank and self._pieces == 1 else None
        with f.loop(begin, end) as unit:
            if not plan.rank:
                store_all([start.inside()])
                return
            flat = f.idiv(unit.i, self._pieces)
            scope = start.inside(unflatten(f, flat, outer_dims, plan.extents))
            scope.hoist(range(len(plan.nodes)), lanes)
            low = f.imul(f.irem(unit.i, self._pieces), self._piece)
            high = f.imin(f.iadd(low, self._piece), plan.extents[last])
            writer.write(scope, writer.coming(start, flat, self._outer), low, high, order)


@dataclass(frozen=True)
class RowWriter:
    """Computes and stores everything along the last dim.

    Attributes:
        plan: what is computed.
        lanes: of a vector.
        fitting: vectors that fit into the registers side by side.
        ahead: rows that are asked for before their turn.
        run: what is asked for ahead of the place where it is read.
    """

    plan: KernelPlan
    lanes: int
    fitting: int
    ahead: Ahead | None
    run: RunAhead | None = None

    @property
    def _group(self) -> int:
        """Vectors that stay together where the order has no pattern."""
        return self.ahead.whole_lines(self.lanes) if self.ahead else 1

    @cached_property
    def unroll(self) -> int:
        """Vectors of a round: pieces of a row start at multiples of them.

        Where results are claimed rounds are short: memory likes requests for a few lines to read and then
        for a few to write.
        """
        if self.ahead and self.ahead.results:
            return min(self.fitting, _VECTORS_BETWEEN_CLAIMS)
        if not self.ahead or not self.ahead.shuffled:
            return self.fitting
        return max(1, self.fitting // self._group) * self._group

    @property
    def _whole(self) -> int:
        """Elements of a row's whole rounds."""
        block = self.unroll * self.lanes
        return self.plan.extents[-1] // block * block

    def _halved(self, target: CpuTarget) -> bool:
        """Whether two vectors become their even and their odd elements: for sums of bf16 into bf16.

        Adjacent bf16 are the halves of 32 bits: one is widened by a shift, the other by a mask.
        """
        plan, last = self.plan, self.plan.rank - 1
        if not target.bf16_dot or not target.mask_registers or self.lanes != target.lanes():
            return False
        if not all(s.combine and s.where < 0 and _is_bf16_run(plan, s) for s in plan.stores):
            return False
        needed = [n for n in needed_nodes(plan, stored_nodes(plan.stores)) if last in plan.depends[n]]
        loads = [plan.nodes[n] for n in needed if not isinstance(plan.nodes[n], Apply)]
        return all(isinstance(n, Load) and n.where < 0 and _is_bf16_run(plan, n) for n in loads)

    def order(self, f: FunctionBuilder, low: Position, high: Position) -> Order | None:
        """The order of the rounds in `[low, high)` of every row; None if it is the natural one."""
        if not self.ahead or not self.ahead.shuffled or not self._whole:
            return None
        every = shuffled_order(f, self._whole, self.lanes, self._group)
        return every if (low, high) == (0, self.plan.extents[-1]) else order_between(f, every, low, high)

    def coming(self, start: Scope, row: Position, end: int) -> list[tuple[Value, int]]:
        """Where the rows after this one begin; see `Ahead.rows`."""
        return self.ahead.rows(start, row, end) if self.ahead else []

    def write(
        self,
        scope: Scope,
        coming: Sequence[tuple[Value, int]],
        low: Position,
        high: Position,
        order: Order | None,
    ) -> None:
        """Everything in `[low, high)` of a row.

        Args:
            scope: knows the row.
            coming: where the rows after it begin.
            low: the first element, a multiple of a round's.
            high: the element after the last one: another multiple, or the row's end.
            order: of these elements.
        """
        f, last, extent, unroll = scope.f, self.plan.rank - 1, self.plan.extents[-1], self.unroll

        def put(parts: list[Lanes], group: int) -> None:
            for first in range(0, len(parts), group):
                if self.ahead:
                    self.ahead.ask(f, coming, parts[first : first + group])
            if self.ahead:
                self.ahead.claim(scope, parts)
            if self.run:
                self.run.ask(scope, parts)
            if group % 2 == 0 and self._halved(f.target):
                parts = [half for low in parts[::2] for half in low.halves()]
            store_all([scope.inside(lanes=part) for part in parts], [group] * (len(parts) // group))

        def body(parts: list[Lanes], values: list[Value]) -> list[Value]:
            put(parts, len(parts))
            return values

        if order is not None:
            ordered_loop(f, last, order, self.lanes, unroll, lambda parts: put(parts, self._group))
            low, unroll = f.imax(low, self._whole), 1
        vector_loop(f, last, low, high, extent, self.lanes, unroll, (), body)


def _is_bf16_run(plan: KernelPlan, access: Load | Store) -> bool:
    """Whether adjacent bf16 are touched along the last dim."""
    last, index = plan.rank - 1, access.index
    if plan.operands[access.operand].dtype != "bf16" or any(last in plan.depends[v] for v in index.values()):
        return False
    return index.is_linear_in(last) and index.factor(last) == 1


def _is_run(plan: KernelPlan, node: Node) -> bool:
    """Whether a node is loaded from adjacent places along the last dim."""
    last = plan.rank - 1
    if not isinstance(node, Load) or node.where >= 0 or not node.index.is_linear_in(last):
        return False
    return node.index.factor(last) == 1 and not any(last in plan.depends[v] for v in node.index.values())


def stored_nodes(stores: Sequence[Store]) -> list[int]:
    """Numbers of all nodes that stores use."""
    return [number for item in stores for number in store_arguments(item)]


def store_all(scopes: Sequence[Scope], runs: Sequence[int] = ()) -> None:
    """Everything that the plan stores at some points, all values before the first store.

    Args:
        scopes: a point or vector each.
        runs: how many of them follow each other along the last dim, run by run; all, if nothing is said.
    """
    stores, first = scopes[0].plan.stores, 0
    evaluate(scopes, stored_nodes(stores))
    for count in runs or [len(scopes)]:
        for item in stores:
            store_run(scopes[first : first + count], item)
        first += count


def meets_itself(plan: KernelPlan) -> bool:
    """Whether two points may write one place: then the order counts."""
    return any(s.index.values() or s.combine for s in plan.stores)

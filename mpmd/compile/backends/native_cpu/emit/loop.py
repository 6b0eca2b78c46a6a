"""Kernels without reductions: every point of the space on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.ahead import Ahead, rows_ahead
from mpmd.compile.backends.native_cpu.emit.nest import product, shuffled_loop, unflatten, vector_loop
from mpmd.compile.backends.native_cpu.emit.scope import Lanes, Scope, store_run
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.emit.together import evaluate, vectors_at_once
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import KernelPlan, Load, Node, Store, store_arguments

# Enough units for load balance among many threads, each long enough that starting it costs nothing.
_WANTED_UNITS = 64
_SHORTEST_UNIT = 2048


@dataclass(frozen=True)
class LoopKernel:
    """A kernel over a plan of kind `loop` that never writes a place twice.

    A unit is one index of all dims but the last, or a piece of the last one.

    Attributes:
        name: its symbol.
        plan: what it computes.
        target: the CPU.
        streamed: numbers of the results that go past the caches.
    """

    name: str
    plan: KernelPlan
    target: CpuTarget
    streamed: frozenset[int] = frozenset()

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand."""
        return tuple(f"p{k}" for k in range(len(self.plan.operands)))

    @property
    def workspace_bytes(self) -> int:
        """Nothing is kept."""
        return 0

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
        block = self._unroll * self._lanes
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
    def _ahead(self) -> Ahead | None:
        """What is asked for before its turn, if every row is one unit."""
        return rows_ahead(self.plan, self.target) if self._pieces == 1 else None

    @cached_property
    def _unroll(self) -> int:
        return vectors_at_once(self.plan, self.target, stored_nodes(self.plan.stores))

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
        with f.loop(begin, end) as unit:
            if not plan.rank:
                store_all([start.inside()])
                return
            last, outer_dims = plan.rank - 1, range(plan.rank - 1)
            flat = f.idiv(unit.i, self._pieces)
            scope = start.inside(unflatten(f, flat, outer_dims, plan.extents))
            scope.hoist(range(len(plan.nodes)), lanes)
            low = f.imul(f.irem(unit.i, self._pieces), self._piece)
            high = f.imin(f.iadd(low, self._piece), plan.extents[last])

            self._row(f, scope, start, unit.i, end, (low, high))

    def _row(
        self,
        f: FunctionBuilder,
        scope: Scope,
        start: Scope,
        row: Value,
        end: Value,
        piece: tuple[Position, Position],
    ) -> None:
        """A unit: a row, or a piece of one."""
        plan, lanes, ahead = self.plan, self._lanes, self._ahead
        last, (low, high) = plan.rank - 1, piece
        coming = ahead.rows(start, row, end) if ahead else []

        def write(parts: list[Lanes], group: int) -> None:
            for first in range(0, len(parts), group):
                if ahead:
                    ahead.ask(f, coming, parts[first : first + group])
            counts = [group] * (len(parts) // group)
            store_all([scope.inside(lanes=part) for part in parts], counts)

        def body(parts: list[Lanes], values: list[Value]) -> list[Value]:
            write(parts, len(parts))
            return values

        if ahead and ahead.shuffled:
            group = ahead.whole_lines(lanes)
            unroll = max(1, self._unroll // group) * group
            whole = plan.extents[last] // (unroll * lanes) * unroll * lanes
            shuffled_loop(f, last, whole, lanes, unroll, group, lambda parts: write(parts, group))
            vector_loop(f, last, whole, high, plan.extents[last], lanes, 1, (), body)
            return
        vector_loop(f, last, low, high, plan.extents[last], lanes, self._unroll, (), body)


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

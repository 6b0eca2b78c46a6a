"""Kernels without reductions: every point of the space on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.nest import product, unflatten, vector_loop
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.emit.streaming import emit_streaming
from mpmd.compile.backends.native_cpu.emit.together import evaluate, vectors_at_once
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.kernels.plan import KernelPlan, Store, store_arguments
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.builder import Index as Position
from mpmd.compile.llvm.module import Module
from mpmd.compile.llvm.types import Value

# Enough units for load balance among many threads, each long enough that starting it costs nothing.
_MIN_UNITS, _MIN_ELEMENTS = 64, 2048


@dataclass(frozen=True)
class LoopKernel(PlanKernel):
    """A kernel over a plan of kind `loop` that never writes a place twice.

    A unit is one index of all dims but the last, or a piece of the last one.

    Attributes:
        streamed: numbers of the results written by non-temporal stores.
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
        pieces = max(1, min(_MIN_UNITS // max(self._outer, 1), extent // _MIN_ELEMENTS))
        block = self._unroll * self.target.lanes()
        return max(1, -(-extent // (pieces * block)) * block)

    @property
    def _pieces(self) -> int:
        return -(-self.plan.extents[-1] // self._piece) if self.plan.rank else 1

    @property
    def units(self) -> int:
        return self._outer * self._pieces if self.plan.size else 0

    @cached_property
    def _unroll(self) -> int:
        return vectors_at_once(self.plan, self.target, stored_nodes(self.plan.stores))

    def emit(self, module: Module) -> Sequence[SharedFunction]:
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
        lanes = self.target.lanes() if plan.rank else 1
        start.hoist(range(len(plan.nodes)), lanes)
        last, outer_dims = plan.rank - 1, range(plan.rank - 1)
        with f.loop(begin, end) as unit:
            if not plan.rank:
                store_all([start.inside()])
                return
            flat = f.idiv(unit.i, self._pieces)
            scope = start.inside(unflatten(f, flat, outer_dims, plan.extents))
            scope.hoist(range(len(plan.nodes)), lanes)
            low = f.imul(f.irem(unit.i, self._pieces), self._piece)
            high = f.imin(f.iadd(low, self._piece), plan.extents[last])
            write_row(scope, low, high, lanes, self._unroll)


def write_row(scope: Scope, low: Position, high: Position, lanes: int, unroll: int) -> None:
    """Compute and store everything in `[low, high)` of the last dim.

    Args:
        scope: knows the row.
        low: the first element, a multiple of a round's.
        high: the element after the last one: another multiple, or the row's end.
        lanes: of a vector.
        unroll: vectors of a round.
    """

    def body(parts: list[Lanes], values: list[Value]) -> list[Value]:
        store_all([scope.inside(lanes=part) for part in parts])
        return values

    last = scope.plan.rank - 1
    vector_loop(scope.f, last, low, high, scope.plan.extents[last], lanes, unroll, (), body)


def stored_nodes(stores: Sequence[Store]) -> list[int]:
    return [number for item in stores for number in store_arguments(item)]


def store_all(scopes: Sequence[Scope]) -> None:
    """Everything that the plan stores at some points, or vectors, all values before the first store."""
    stores = scopes[0].plan.stores
    evaluate(scopes, stored_nodes(stores))
    for item in stores:
        for scope in scopes:
            scope.store(item)


def meets_itself(plan: KernelPlan) -> bool:
    """Whether two points may write one place: then the order counts."""
    return any(s.index.values() or s.combine for s in plan.stores)

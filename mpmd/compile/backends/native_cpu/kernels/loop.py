"""Kernels without reductions, and epilogues of matrix products: every point of the space on its own.

Several vectors are computed at once, their operations interleaved.  An operation takes a few cycles and its
result is wanted at once by the next one.  Cores look ahead, but not past a long chain of operations to the
vector after it; so the code does one operation for all vectors of a round before it does the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Position
from mpmd.compile.backends.native_cpu.kernels.places import Lanes, product, unflatten, vector_loop
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import PlanKernel, emit_streaming
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.kernels.index import dim, linear, strides_of
from mpmd.compile.kernels.kernel_plan import (
    Apply,
    Constant,
    KernelPlan,
    Load,
    ReduceNode,
    Store,
    arguments,
    store_arguments,
)
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index
from mpmd.compile.llvm.llvm_types import Value, lanes_of
from mpmd.errors import CompileError

MAX_VECTORS = 4
_MAX_OPERATIONS = 128  # of all vectors of a round: more code is not worth its compilation
_KEPT_FREE = 4  # registers for addresses of memory operands that LLVM loads first, and for sums
_INSIDE_EXPENSIVE = 4  # registers that a function such as tanh needs for itself


def needed_nodes(plan: KernelPlan, roots: Iterable[int], known: Iterable[int] = ()) -> list[int]:
    """The nodes that some nodes are computed from, themselves included, each after its arguments.

    Args:
        plan: the plan.
        roots: numbers of the nodes that are wanted.
        known: numbers of nodes whose values are there; what only they need is left out.
    """
    there, needed, waiting = set(known), set[int](), list(roots)
    while waiting:
        number = waiting.pop()
        if number in needed or number in there:
            continue
        needed.add(number)
        if not isinstance(plan.nodes[number], ReduceNode):
            waiting += arguments(plan.nodes[number])
    return sorted(needed)


def evaluate(scopes: Sequence[Scope], roots: Sequence[int]) -> None:
    """Compute nodes in all scopes of one plan, an operation of every scope after the other."""
    if not scopes:
        return
    plan = scopes[0].plan
    known = [k for k in range(len(plan.nodes)) if all(s.known(k) is not None for s in scopes)]
    for number in needed_nodes(plan, roots, known):
        for scope in scopes:
            scope.value(number)


def vectors_at_once(plan: KernelPlan, target: CpuTarget, roots: Sequence[int], sums: int = 0) -> int:
    """How many vectors of elements fit into the registers side by side.

    Args:
        plan: the plan.
        target: the CPU.
        roots: numbers of the nodes that are computed.
        sums: running totals that every vector has of its own.
    """
    row = set(plan.row) if plan.row_dims else {plan.rank - 1}
    nodes = [k for k in needed_nodes(plan, roots) if plan.depends[k] & row or not plan.rank]
    operations = [n for n in (plan.nodes[k] for k in nodes) if isinstance(n, Apply)]
    last_use = dict.fromkeys(roots, len(plan.nodes))
    for k in nodes:
        for argument in arguments(plan.nodes[k]):
            last_use[argument] = max(last_use.get(argument, 0), k)
    alive = [n for n in nodes if not isinstance(plan.nodes[n], Constant)]
    most = max((sum(n <= k < last_use.get(n, n) for n in alive) for k in nodes), default=0)
    expensive = any(OPERATIONS[n.op].is_expensive for n in operations)
    each = sums + most + (_INSIDE_EXPENSIVE if expensive else 1)
    fitting = min((target.vector_registers - _KEPT_FREE) // each, _MAX_OPERATIONS // max(1, len(operations)))
    return max(1, min(MAX_VECTORS, fitting))


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

    def emit_units(self, f: FunctionBuilder, pointers: dict[int, Value]) -> None:
        emit_streaming(f, pointers, self.streamed, lambda streams: self._emit(f, pointers, streams))

    def _emit(self, f: FunctionBuilder, pointers: dict[int, Value], streams: bool) -> None:
        plan = self.plan
        start = Scope(f, plan, pointers, streamed=self.streamed if streams else frozenset())
        lanes = self.target.lanes() if plan.rank else 1
        start.hoist(range(len(plan.nodes)), lanes)
        last, outer_dims = plan.rank - 1, range(plan.rank - 1)
        with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
            if not plan.rank:
                store_all([start.inside()])
                return
            flat = f.idiv(unit.i, self._pieces)
            scope = start.inside(unflatten(f, flat, outer_dims, plan.extents))
            scope.hoist(range(len(plan.nodes)), lanes)
            low = f.imul(f.irem(unit.i, self._pieces), self._piece)
            high = f.imin(f.iadd(low, self._piece), plan.extents[last])
            write_row(scope, low, high, lanes, self._unroll)


def write_row(scope: Scope, low: Index, high: Index, lanes: int, unroll: int) -> None:
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


@dataclass(frozen=True)
class PlanEpilogue:
    """The epilogue that a plan of kind `loop` over `batch..., m, n` describes.

    Attributes:
        plan: the plan; not normalised.
        sums: number of the operand for the product's sums.  It is read as a dense array of the
            accumulators' dtype, and is not an argument of the kernel.
    """

    plan: KernelPlan
    sums: int

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand but the sums, `p` and the operand's number."""
        return tuple(f"p{k}" for k in range(len(self.plan.operands)) if k != self.sums)

    def check(self, gemm: Gemm) -> None:
        """Refuse a plan that does not fit a product.

        Raises:
            CompileError: the space, a reduction, or the way the sums are read.
        """
        plan, space = self.plan, (*gemm.batch, gemm.m, gemm.n)
        if plan.kind != "loop" or plan.extents != space:
            raise CompileError(
                f"epilogue {plan.name} is a {plan.kind} kernel over {plan.extents}; "
                f"the product needs a loop over {space}"
            )
        dense = linear([dim(d) for d in range(plan.rank)], strides_of(space))
        for node in plan.nodes:
            if isinstance(node, Load) and node.operand == self.sums and node.index != dense:
                raise CompileError(f"epilogue {plan.name} reads the sums at {node.index}, not at {dense}")
        if plan.operands[self.sums].dtype != gemm.accumulator:
            raise CompileError(
                f"epilogue {plan.name} reads the sums as {plan.operands[self.sums].dtype}; "
                f"they are {gemm.accumulator}"
            )

    def vectors_at_once(self, target: CpuTarget) -> int:
        """How many vectors of sums are best given to `emit` together."""
        return vectors_at_once(self.plan, target, stored_nodes(self.plan.stores))

    def emit(self, f: FunctionBuilder, parts: Sequence[tuple[Value, Position]]) -> None:
        plan = self.plan
        scopes: list[Scope] = []
        pointers = {k: f.arguments[f"p{k}"] for k in range(len(plan.operands)) if k != self.sums}
        for sums, at in parts:
            dims = dict(enumerate((*at.batch, at.row)))
            lanes = Lanes(plan.rank - 1, at.column, lanes_of(sums.type), at.mask)
            scope = Scope(f, plan, pointers, dims=dims, lanes=lanes)
            for number, node in enumerate(plan.nodes):
                if isinstance(node, Load) and node.operand == self.sums:
                    scope.define(number, sums)
            scopes.append(scope)
        store_all(scopes)

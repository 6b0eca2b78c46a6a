"""Kernels of plans in general; non-temporal stores, which do not first read the lines that they overwrite.

A store brings its line into the cache, though a vector will overwrite all of it.  A kernel that moves more
than the last cache level holds has no use for these lines: by the time that its results are read,
their beginning is evicted.  Non-temporal stores save the reading, a third of the traffic of a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.shared import SharedFunction, kernel_function
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.kernels.kernel_plan import ELEMENT, KernelPlan, Load, Store, store_level
from mpmd.compile.llvm.cpu import LINE_BYTES, CpuTarget
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant


@dataclass(frozen=True)
class PlanKernel(ABC):
    """A kernel that computes a plan: one pointer per operand, and no workspace.

    Attributes:
        name: its symbol.
        plan: its computation.
        target: the CPU.
    """

    name: str
    plan: KernelPlan
    target: CpuTarget

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand."""
        return tuple(f"p{k}" for k in self.operands)

    @property
    def operands(self) -> range:
        return range(len(self.plan.operands))

    @property
    @abstractmethod
    def units(self) -> int:
        """See `CpuKernel`; none if the space is empty."""

    @property
    def workspace_bytes(self) -> int:
        return 0

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        with kernel_function(module, self) as f:
            if self.units:
                self.emit_units(f, {k: f.arguments[f"p{k}"] for k in self.operands})
        return ()

    @abstractmethod
    def emit_units(self, f: FunctionBuilder, pointers: dict[int, Value]) -> None:
        """The code of the units from `begin` to `end`, given the address of each operand."""


def streamed_operands(plan: KernelPlan, target: CpuTarget, in_place: Collection[int] = ()) -> frozenset[int]:
    """Numbers of the results written by non-temporal stores.

    Args:
        plan: the plan, normalised.
        target: the CPU.
        in_place: numbers of results that lie over something that the kernel reads: their lines are there.
    """
    if not target.is_x86 or _moved_bytes(plan) < target.l3_bytes:
        return frozenset()
    read = {n.operand for n in plan.nodes if isinstance(n, Load)}.union(in_place)
    by_operand: dict[int, list[Store]] = {}
    for store in plan.stores:
        by_operand.setdefault(store.operand, []).append(store)
    return frozenset(
        number
        for number, stores in by_operand.items()
        if number not in read and all(_fills_lines(plan, store, target) for store in stores)
    )


def _moved_bytes(plan: KernelPlan) -> int:
    """Bytes of all arrays; of those that are touched at computed places only, no more than are touched."""
    touched = [(n.operand, n.index) for n in plan.nodes if isinstance(n, Load)]
    touched += [(s.operand, s.index) for s in plan.stores]
    evenly = {operand for operand, index in touched if not index.values()}
    most = [plan.size * BYTES[o.dtype] for o in plan.operands]
    return sum(o.bytes if k in evenly else min(o.bytes, most[k]) for k, o in enumerate(plan.operands))


def _fills_lines(plan: KernelPlan, store: Store, target: CpuTarget) -> bool:
    """Whether rows start at lines: every vector is written whole, at a multiple of its size."""
    if store.combine or store.where >= 0 or store.index.values() or not plan.rank:
        return False
    if store_level(plan, store) != ELEMENT and plan.kind != "loop":
        return False
    last, size = plan.rank - 1, BYTES[plan.operands[store.operand].dtype]
    if size * target.lanes() < LINE_BYTES // 2:  # two of them fill a line
        return False
    others = [factor for atom, factor in store.index.terms if atom.kind != "dim" or atom.number != last]
    steps = store.index.is_linear_in(last) and store.index.factor(last) == 1
    line = max(target.lanes(), LINE_BYTES // size)
    return steps and not any(factor % line for factor in (*others, store.index.constant))


def emit_streaming(
    f: FunctionBuilder, pointers: dict[int, Value], streamed: Collection[int], body: Callable[[bool], None]
) -> None:
    """Write a kernel's code twice, streaming for results that start at a line, and plainly for others.

    Args:
        f: the kernel's function.
        pointers: address of each operand.
        streamed: numbers of the results in question; without any the code is written once.
        body: writes the code; its argument is whether stores may be non-temporal.
    """
    if streamed:
        # One test for all results: the low bits of their addresses, or-ed together. The code is written
        # twice, as the kind of a store is fixed in an instruction.
        together = constant(0, "i64")
        for number in sorted(streamed):
            together = f.or_(together, f.op(f"ptrtoint ptr {pointers[number]} to i64", "i64"))
        rest = f.and_(together, constant(LINE_BYTES - 1, "i64"))
        with f.when(f.compare("eq", rest, constant(0, "i64")), returns=True):
            body(True)
            # non-temporal stores are not ordered with the others: a fence, before another thread may read
            # the results
            f.finish_streams()
    body(False)

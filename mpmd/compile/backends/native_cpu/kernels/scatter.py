"""Kernels whose points may write one place: the order counts, and every place is written in it.

The gradient of an embedding adds a row to the row of each token.  Two tokens may be the same, but two columns
never meet: threads divide the columns, and each adds all rows to its own, in order.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from mpmd.compile.backends.native_cpu.kernels.loop import store_all, stored_nodes, vectors_at_once, write_row
from mpmd.compile.backends.native_cpu.kernels.places import product, unflatten
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.kernels.kernel_plan import KernelPlan, Load
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.llvm_types import Value

_MIN_UNITS = 16


@dataclass(frozen=True)
class ScatterKernel(PlanKernel):
    """A kernel over a plan of kind `loop` that meets itself.

    A unit is a piece of the last dim, for all indices of the others; or everything.

    Attributes:
        apart: whether pieces of the last dim never meet.
    """

    apart: bool

    @cached_property
    def _unroll(self) -> int:
        _, plan = self._guarded
        return vectors_at_once(plan, self.target, stored_nodes(plan.stores)) if self.apart else 1

    @cached_property
    def _guarded(self) -> tuple[int, KernelPlan]:
        """A node that says for a whole row whether it is written, or -1, and the update if so."""
        plan, guard = self.plan, self.plan.stores[0].where
        if guard < 0 or not plan.rank or any(store.where != guard for store in plan.stores):
            return -1, plan
        # A guard that is the same for the whole row becomes one branch around it; one that changes along
        # the row stays a mask.
        if plan.rank - 1 in plan.depends[guard]:
            return -1, plan
        return guard, replace(plan, stores=tuple(replace(store, where=-1) for store in plan.stores))

    @property
    def _piece(self) -> int:
        """Elements of the last dim that one unit does: whole rounds."""
        extent = self.plan.extents[-1]
        if not self.apart:
            return max(1, extent)
        block = self._unroll * self.target.lanes()
        return -(-extent // (_MIN_UNITS * block)) * block

    @property
    def units(self) -> int:
        if not self.plan.size:
            return 0
        return -(-self.plan.extents[-1] // self._piece) if self.plan.rank else 1

    def emit_units(self, f: FunctionBuilder, pointers: dict[int, Value]) -> None:
        guard, plan = self._guarded
        begin, end = f.arguments["begin"], f.arguments["end"]
        start = Scope(f, plan, pointers)
        lanes = self.target.lanes() if plan.rank else 1
        start.hoist(range(len(plan.nodes)), lanes)
        if not plan.rank:
            with f.loop(begin, end):
                store_all([start.inside()])
            return
        # Columns outside, rows inside: a thread does all rows of its columns in order, so that two rows
        # that meet are added in the order of the program.
        low = f.imul(begin, self._piece)
        high = f.imin(f.imul(end, self._piece), plan.extents[-1])
        outer = range(plan.rank - 1)
        rows = product(plan.extents, outer)
        with f.loop(0, rows) as row:
            scope = start.inside(unflatten(f, row.i, outer, plan.extents))
            scope.hoist(range(len(plan.nodes)), lanes)
            if guard < 0:
                write_row(scope, low, high, lanes, self._unroll)
            else:
                with f.when(scope.value(guard)):
                    write_row(scope, low, high, lanes, self._unroll)


def pieces_apart(plan: KernelPlan, in_place: Collection[int] = ()) -> bool:
    """Whether two indices of the last dim never write, or read and write, the same element.

    Args:
        plan: a plan that meets itself.
        in_place: numbers of the results that lie over something else that the plan reads.
    """
    written = [store.operand for store in plan.stores]
    read = {n.operand for n in plan.nodes if isinstance(n, Load)}
    if not plan.rank or len(set(written)) < len(written) or in_place or read & set(written):
        return False
    last = plan.rank - 1
    for store in plan.stores:
        if not store.index.is_linear_in(last) or store.index.factor(last) != 1:
            return False
        if any(last in plan.depends[v] for v in store.index.values()):
            return False
        others = [factor for atom, factor in store.index.terms if atom.kind != "dim" or atom.number != last]
        # Two elements of the last dim meet only if rows overlap: starts of rows differ by multiples of the
        # pitch.
        pitch = math.gcd(*others)  # rows of the result start so many elements apart, or multiples of it
        if others and pitch < plan.extents[last]:
            return False
    return True

"""Common part of sorting rows and selecting from them: loops over rows, elements, results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.kernels.places import product, unflatten
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import PlanKernel
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.storage import MEMORY, narrow
from mpmd.compile.kernels.kernel_plan import Load
from mpmd.compile.kernels.sort_patterns import SortedArray, Sorting
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value


@dataclass(frozen=True)
class SortingKernel(PlanKernel, ABC):
    """A kernel over a plan that sorts, not normalised.  A unit is a row.

    Attributes:
        sorting: the sorted arrays, and how much of them is kept.
    """

    sorting: Sorting

    @property
    def units(self) -> int:
        return product(self.plan.extents, range(self.sorting.along)) if self.plan.size else 0

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        with FunctionBuilder(module, self.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
            if self.units:
                pointers = {k: f.arguments[p] for k, p in enumerate(self.pointers)}
                with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
                    dims = unflatten(f, unit.i, range(self.sorting.along), self.plan.extents)
                    self.emit_row(f, Scope(f, self.plan, pointers, dims=dims))
        return ()

    @abstractmethod
    def emit_row(self, f: FunctionBuilder, row: Scope) -> None:
        """The code of one row, in a scope that knows where it lies."""


def element(row: Scope, sorting: Sorting, array: SortedArray, at: Position) -> Value:
    """An array's element of a row, in its type in memory."""
    scope = row.inside({sorting.along: at})
    node = row.plan.nodes[array.element]
    if isinstance(node, Load):
        return row.f.load(row.pointers[array.source], MEMORY[array.dtype], scope.position(node.index))
    return narrow(row.f, scope.value(array.element), array.dtype)


def write(row: Scope, sorting: Sorting, number: Value, values: Sequence[Value]) -> None:
    """Write the element of each array, in its type in memory, to the position given by a count."""
    scope = row.inside()
    scope.define(sorting.count, row.f.cast("trunc", number, "i32"))
    for array, value in zip(sorting.arrays, values, strict=True):
        row.f.store(value, row.pointers[array.target], scope.position(array.place))

"""What sorting rows and selecting from them have in common: loops over rows, elements, results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmd.compile.backends.native_cpu.emit.nest import unflatten
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.kernel import CpuKernel
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value
from mpmd.compile.backends.native_cpu.storage import MEMORY, narrow
from mpmd.compile.kernels.plan import KernelPlan, Load
from mpmd.compile.kernels.sorting import SortedArray, Sorting


def emit_rows(
    kernel: CpuKernel,
    module: Module,
    plan: KernelPlan,
    sorting: Sorting,
    row: Callable[[FunctionBuilder, Scope], None],
) -> None:
    """Add a kernel to a module, of which every unit is a row that is sorted.

    Args:
        kernel: the kernel; its pointers are the plan's operands.
        module: where it goes.
        plan: what it computes.
        sorting: what is sorted.
        row: writes the code for one row, in a scope that knows where it lies.
    """
    arguments = [(p, "ptr") for p in (*kernel.pointers, "workspace")]
    with FunctionBuilder(module, kernel.name, [*arguments, ("begin", "i64"), ("end", "i64")]) as f:
        if kernel.units:
            pointers = {k: f.arguments[p] for k, p in enumerate(kernel.pointers)}
            with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
                dims = unflatten(f, unit.i, range(sorting.along), plan.extents)
                row(f, Scope(f, plan, pointers, dims=dims))


def element(row: Scope, sorting: Sorting, array: SortedArray, at: Position) -> Value:
    """An array's element of a row, as it lies in memory."""
    scope = row.inside({sorting.along: at})
    node = row.plan.nodes[array.element]
    if isinstance(node, Load):
        return row.f.load(row.pointers[array.source], MEMORY[array.dtype], scope.position(node.index))
    return narrow(row.f, scope.value(array.element), array.dtype)


def write(row: Scope, sorting: Sorting, number: Value, values: Sequence[Value]) -> None:
    """Write the element of each array, as it lies in memory, before which so many others come."""
    scope = row.inside()
    scope.define(sorting.count, row.f.cast("trunc", number, "i32"))
    for array, value in zip(sorting.arrays, values, strict=True):
        row.f.store(value, row.pointers[array.target], scope.position(array.place))

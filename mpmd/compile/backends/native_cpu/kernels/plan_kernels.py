"""From a plan to the kernels that compute it: one, or two with partial sums in between.

Rows of a few elements, one from each array, such as interleaved pairs: vectors of rows.

    stack([x, y], -1)  [rows, 2]   ->   for each block of rows, for each of its columns: a vector of rows

A vector along such a row would hold two or three elements, each with a load of its own.  In a
vector of rows one array is read, mostly in order, and the stores have a stride, which scatters take.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.kernels.column import ColumnKernel, strip_vectors
from mpmd.compile.backends.native_cpu.kernels.loop import LoopKernel, meets_itself
from mpmd.compile.backends.native_cpu.kernels.partials import CombineKernel, Partials
from mpmd.compile.backends.native_cpu.kernels.places import product
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import streamed_operands
from mpmd.compile.backends.native_cpu.kernels.row import RowKernel
from mpmd.compile.backends.native_cpu.kernels.scatter import ScatterKernel, pieces_apart
from mpmd.compile.backends.native_cpu.kernels.sort_rows import MergeSortKernel, SelectionKernel
from mpmd.compile.backends.native_cpu.kernels.tiles import TileKernel, strided_dim
from mpmd.compile.backends.native_cpu.shared import CpuKernel
from mpmd.compile.backends.native_cpu.storage import check_dtype
from mpmd.compile.kernels.kernel_plan import ELEMENT, ROW, KernelPlan, Load, ReduceNode, store_level
from mpmd.compile.kernels.normalise import normalise, reordered, split
from mpmd.compile.kernels.sort_patterns import sorting_of
from mpmd.compile.llvm.cpu import CpuTarget

# Groups of outer indices: for load balance a unit for each of many threads, for speed many rows in each.
_MIN_UNITS, _MIN_ROWS = 16, 32
# Elements of a row up to which comparing all pairs, a vector of them at once, beats merging.
_MIN_MERGED = 256
# The same where only the first few are wanted, which are kept in order while the others pass.
_MIN_SELECTED = 16


@dataclass(frozen=True)
class Temporary:
    """Memory that the kernels of one plan share, alive from the first to the last.

    Attributes:
        name: name of the pointer argument.
        bytes: its size.
    """

    name: str
    bytes: int


@dataclass(frozen=True)
class KernelSequence:
    """Kernels that run one after the other, each finished before the next.

    Attributes:
        plan: the plan, rewritten unless it sorts; its operands are the pointers `p0`, `p1` ...
        kernels: one or two kernels; each takes the operands and then those temporaries that it names.
        temporaries: memory for partial sums.
    """

    plan: KernelPlan
    kernels: tuple[CpuKernel, ...]
    temporaries: tuple[Temporary, ...] = ()


def plan_kernels(plan: KernelPlan, target: CpuTarget, in_place: Collection[int] = ()) -> KernelSequence:
    """The kernels for a plan.

    Args:
        plan: the plan.
        target: the CPU.
        in_place: numbers of the operands that are results and lie over something that the plan reads.

    Raises:
        CompileError: the plan has a dtype that the CPU backend lacks.
    """
    for operand in plan.operands:
        check_dtype(operand.dtype)
    sorting = sorting_of(plan)
    if sorting is not None and sorting.kept < plan.row_size and plan.row_size > _MIN_SELECTED:
        return KernelSequence(plan, (SelectionKernel(plan.name, plan, target, sorting),))
    if sorting is not None and plan.row_size > _MIN_MERGED:
        return KernelSequence(plan, (MergeSortKernel(plan.name, plan, target, sorting),))
    plan = normalise(plan)
    streamed = streamed_operands(plan, target, in_place)
    if plan.kind == "loop":
        strided = strided_dim(plan)
        if strided is not None:
            return KernelSequence(plan, (TileKernel(plan.name, plan, target, strided, streamed),))
        if meets_itself(plan):
            apart = pieces_apart(plan, in_place)
            return KernelSequence(plan, (ScatterKernel(plan.name, plan, target, apart),))
        wide = across_rows(plan, target)
        streamed = streamed if wide is plan else frozenset()
        return KernelSequence(wide, (LoopKernel(plan.name, wide, target, streamed),))
    if plan.kind == "row":
        return KernelSequence(plan, (RowKernel(plan.name, plan, target, streamed=streamed),))
    batch = product(plan.extents, range(plan.batch_dims))
    if plan.kind == "column" and plan.size and _sums_in_strips(plan, target):
        strips = -(-plan.extents[-1] // (strip_vectors(plan, target) * target.lanes()))
        strips *= batch * product(plan.extents, list(plan.row)[:-1])
        parts = Partials(plan, target, _groups(plan, strips))
        column = ColumnKernel(plan.name, plan, target, parts)
        return KernelSequence(plan, (column,)) if parts.groups == 1 else _two_steps(column, parts)
    parts = Partials(plan, target, _groups(plan, batch))
    return _two_steps(RowKernel(plan.name, plan, target, parts, streamed), parts)


def _two_steps(first: CpuKernel, parts: Partials) -> KernelSequence:
    temporaries = tuple(Temporary(parts.name(n), parts.bytes_of(n)) for n in parts.reductions)
    combine = CombineKernel(f"{parts.plan.name}_combine", parts)
    return KernelSequence(parts.plan, (first, combine), temporaries)


def _groups(plan: KernelPlan, units: int) -> int:
    """Groups of outer indices, given how many units there are without them."""
    rows = product(plan.extents, plan.outer)
    return max(1, min(-(-_MIN_UNITS // max(units, 1)), rows // _MIN_ROWS))


def _sums_in_strips(plan: KernelPlan, target: CpuTarget) -> bool:
    """Whether nothing happens once per row, and a strip is a whole row or all arrays stay in a cache."""
    if not plan.row_dims or any(store_level(plan, s) == ROW for s in plan.stores):
        return False
    if any(plan.levels[n.arg] != ELEMENT for n in plan.nodes if isinstance(n, ReduceNode)):
        return False
    if plan.row_dims == 1 and plan.extents[-1] <= strip_vectors(plan, target) * target.lanes():
        return True
    touched = {
        n.operand for k, n in enumerate(plan.nodes) if isinstance(n, Load) and plan.levels[k] == ELEMENT
    }
    touched |= {s.operand for s in plan.stores if store_level(plan, s) == ELEMENT}
    return sum(plan.operands[k].bytes for k in sorted(touched)) <= target.l2_bytes


_MAX_BLOCK = 1024
"""Rows whose columns are written one after the other, while the lines stay in the nearest cache."""


def across_rows(plan: KernelPlan, target: CpuTarget) -> KernelPlan:
    """A plan of kind `loop`; its last two dims exchanged if the last is narrow and joins single elements."""
    lanes = target.lanes()
    if plan.rank < 2 or not target.mask_registers or plan.extents[-1] > lanes // 4:
        return plan
    pieces = sum(isinstance(node, Load) and node.where >= 0 for node in plan.nodes)
    if pieces < plan.extents[-1]:
        return plan
    block = math.gcd(plan.extents[-2], _MAX_BLOCK)
    if plan.extents[-2] > _MAX_BLOCK and block >= lanes:
        plan = split(plan, plan.rank - 2, block)
    if plan.extents[-2] < lanes:
        return plan
    return reordered(plan, (*range(plan.rank - 2), plan.rank - 1, plan.rank - 2))

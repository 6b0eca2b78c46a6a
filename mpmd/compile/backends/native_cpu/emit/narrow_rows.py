"""Rows of a few elements, one from each array, such as interleaved pairs: vectors of rows.

    stack([x, y], -1)  [rows, 2]   ->   for each block of rows, for each of its columns: a vector of rows

A vector along such a row would hold two or three elements, each with a load of its own.  In a
vector of rows one array is read, mostly in order, and the stores have a stride, which scatters take.
"""

from __future__ import annotations

import math

from mpmd.compile.kernels.kernel_plan import KernelPlan, Load
from mpmd.compile.kernels.normalise import reordered, split
from mpmd.compile.llvm.cpu import CpuTarget

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

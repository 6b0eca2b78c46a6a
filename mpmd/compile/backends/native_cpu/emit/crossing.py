"""Arrays that a kernel without reductions reads across their rows.

Along the last dim, where results are written, such an array steps by more than one element; along another
dim, the crossing dim, it steps by one.
"""

from __future__ import annotations

from mpmd.compile.backends.native_cpu.emit.loop import meets_itself
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import KernelPlan, Load


def crossing_dim(plan: KernelPlan) -> int | None:
    """The dim along which arrays that cross the last dim are contiguous, or None if no array crosses it."""
    if plan.rank < 2 or meets_itself(plan):
        return None
    last = plan.rank - 1
    for node in plan.nodes:
        if isinstance(node, Load) and crosses(node, last):
            dims = [d for d in range(last) if node.index.factor(d) == 1 and node.index.is_linear_in(d)]
            if dims:
                return dims[-1]
    return None


def crossing_loads(plan: KernelPlan, crossing: int) -> list[int]:
    """Numbers of the loads that step by one along a dim and by more along the last one."""
    last = plan.rank - 1
    return [
        k
        for k, n in enumerate(plan.nodes)
        if isinstance(n, Load)
        and crosses(n, last)
        and n.index.factor(crossing) == 1
        and n.index.is_linear_in(crossing)
    ]


def crosses(node: Load, last: int) -> bool:
    """Whether a load steps by more than one element along the last dim, always by as many."""
    plain = node.where < 0 and not node.index.values() and node.index.is_linear_in(last)
    return plain and abs(node.index.factor(last)) > 1


def only_moves(plan: KernelPlan, crossing: int) -> bool:
    """Whether all that is stored is what crossing loads read, in runs along the last dim."""
    tiles, last = crossing_loads(plan, crossing), plan.rank - 1
    return all(
        s.node in tiles
        and s.where < 0
        and not s.combine
        and not s.index.values()
        and s.index.is_linear_in(last)
        and s.index.factor(last) == 1
        for s in plan.stores
    )


def moved_lanes(plan: KernelPlan, target: CpuTarget) -> int:
    """Elements of the vectors in which values are stored that are only moved: registers of the widest."""
    return target.vector_bytes // max(BYTES[plan.operands[s.operand].dtype] for s in plan.stores)

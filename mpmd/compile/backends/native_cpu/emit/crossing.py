"""Arrays that a kernel without reductions reads across their rows.

Along the last dim, where results are written, such an array steps by more than one element; along another
dim, the crossing dim, it steps by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.emit.loop import meets_itself
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import KernelPlan, Load

PIECE_BYTES = 16  # within which registers are interleaved at the highest rate


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


@dataclass(frozen=True)
class Tile:
    """A load that crosses.

    Attributes:
        number: its node.
        node: the load.
        step: elements from one row of the source to the next.
        lanes: elements of a register.
        columns: elements of a block along the crossing dim, whole registers.
    """

    number: int
    node: Load
    step: int
    lanes: int
    columns: int

    @property
    def bytes(self) -> int:
        """Size of an element."""
        return BYTES[self.node.dtype]

    @property
    def piece(self) -> int:
        """Elements of a piece, and rows that are interleaved."""
        return PIECE_BYTES // self.bytes

    @property
    def element(self) -> str:
        """LLVM type of an element in memory."""
        return MEMORY[self.node.dtype]

"""Common part of kernels of plans."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.kernels.plan import KernelPlan
from mpmd.compile.llvm.target import CpuTarget


@dataclass(frozen=True)
class PlanKernel:
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
        return tuple(f"p{k}" for k in range(len(self.plan.operands)))

    @property
    def workspace_bytes(self) -> int:
        return 0

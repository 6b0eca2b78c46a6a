"""hlo-optimization-barrier-removal."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.passes.hlo_pass import ComputationPass


class OptimizationBarrierRemoval(ComputationPass):
    """Removes optimisation barriers after the last merge of instructions.

    opt-barrier(x) -> x

    Requires: no schedule; no CSE comes after, or rematerialised values are merged.
    Ensures: no opt-barrier is left.
    Cost: linear.
    Source: XLA's optimisation barrier expander.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        changed = False
        for instruction in computation.instructions:
            if instruction.opcode == "opt-barrier":
                computation.replace(instruction, instruction.operands[0])
                changed = True
        return changed

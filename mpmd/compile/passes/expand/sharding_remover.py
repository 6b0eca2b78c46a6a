"""hlo-sharding-remover."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.errors import PassError

_MARKS = frozenset(["Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint"])


@dataclasses.dataclass(frozen=True)
class ShardingRemover(ComputationPass):
    """Removes shardings of arrays from a program for one partition.

    custom-call(x), custom_call_target="Sharding", sharding={devices=[2,1]<=[2]} -> x

    Requires: no schedule; one partition.
    Ensures: no sharding is left, neither as an annotation nor as a custom call.
    Cost: linear.
    Source: XLA's sharding remover.
    """

    name = "hlo-sharding-remover"

    def rewrite(self, module: HloModule) -> bool:
        """Removes custom calls and annotations.

        Raises:
            PassError: the program is for several partitions, so that its shardings have a meaning.
        """
        if module.num_partitions != 1:
            raise PassError(
                f"{self.name}: module {module.name} is for {module.num_partitions} partitions\n"
                "  partition it before its shardings are removed"
            )
        changed = super().rewrite(module)
        for instruction in module.instructions():
            if instruction.sharding:
                instruction.sharding = ""
                changed = True
        return changed

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Removes the custom calls of one computation."""
        return Rewriter(computation).run({"custom-call": (_operand,)}, lambda i: True)


def _operand(site: RewriteSite) -> HloInstruction | None:
    if site.at.custom_call_target not in _MARKS or len(site.operands) != 1:
        return None
    (x,) = site.operands
    return x if x.shape.logical is site.shape.logical else None

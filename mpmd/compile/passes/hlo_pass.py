"""Base classes of passes over HLO."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.module import HloModule
from mpmd.errors import PassError
from mpmd.support.passes import Pass


class HloPass(Pass):
    """A pass that rewrites an unscheduled module."""

    prefix = "hlo-"

    def run(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff that changed it.

        Raises:
            PassError: the module is scheduled: a rewrite would lose the order.
        """
        if module.is_scheduled:
            raise PassError(
                f"{self.name} must run before the scheduler\n"
                f"  module {module.name} is scheduled; remove is_scheduled=true to run the pass on it"
            )
        return self.rewrite(module)

    @abc.abstractmethod
    def rewrite(self, module: HloModule) -> bool:
        """Runs the pass; True iff it changed something."""


class ComputationPass(HloPass):
    """A pass that rewrites one computation after the other, callees before callers.

    Bodies of fusions are left alone: they belong to the passes that form them.

    Attributes:
        abandons: a rewrite may leave computations without callers; they are removed then.
    """

    abandons: ClassVar[bool] = False

    def rewrite(self, module: HloModule) -> bool:
        changed = False
        for computation in unfused(module):
            changed |= self.rewrite_computation(computation)
        if changed and self.abandons:
            module.remove_unreached()
        return changed

    @abc.abstractmethod
    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation; True iff it changed something."""


def unfused(module: HloModule) -> list[HloComputation]:
    """Computations that are not bodies of fusions, callees before callers."""
    return [c for c in module.call_order() if all(i.opcode != "fusion" for i in c.callers)]


class Fixpoint(Pass):
    """Runs passes again and again until none of them changes anything.

    Attributes:
        label: the name of the group; part of the name in timings and dumps.
        passes: in the order in which they run.
        most: maximum of rounds; rules that undo each other would never end.
    """

    prefix = "hlo-"
    label: str = ""
    passes: tuple[Pass, ...] = ()
    most: int = 25

    def run(self, module: Any) -> bool:
        """Runs the rounds.  A pass that ran since the last change is not run again."""
        changed, quiet = False, 0
        for _ in range(self.most):
            for pass_ in self.passes:
                if quiet == len(self.passes):
                    return changed
                if pass_.run(module):
                    changed, quiet = True, 0
                else:
                    quiet += 1
        return changed

    def __str__(self) -> str:
        return f"{self.name}{{{self.label}}}"

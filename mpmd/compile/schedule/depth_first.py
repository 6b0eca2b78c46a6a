"""hlo-depth-first-schedule."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.module import HloModule
from mpmd.support.passes import Pass


@dataclasses.dataclass(frozen=True)
class DepthFirstSchedule(Pass):
    """Orders every computation so that what an instruction needs runs shortly before it.

    Requires: nothing.
    Ensures: the module is scheduled.
    Cost: linear.
    Source: the depth-first order of XLA's memory scheduler.
    """

    name = "hlo-depth-first-schedule"

    def run(self, module: HloModule) -> bool:
        """Orders `module`; True iff it was not scheduled before."""
        if module.is_scheduled:
            return False
        for computation in module.computations:
            computation.reorder(computation.post_order())
        module.is_scheduled = True
        return True

"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.placement import visits
from mpmd.scheduling.table import PipelineSchedule, Shape
from mpmd.scheduling.task import Phase, Task


@dataclass(frozen=True)
class GPipe(PipelineSchedule):
    """All forwards of the step, then all backwards.

    Idle per mesh ``(p-1)(F+B)``; holds the activations of every microbatch.  A mesh that is visited several
    times finishes one visit for all microbatches before the next.

    Source: Huang et al., GPipe, 2019.
    """

    name = "gpipe"

    def orders(self, shape: Shape) -> Sequence[Sequence[Task]]:
        """Forwards by visit and microbatch, backwards by reversed visit and microbatch."""
        way = visits(shape.placement)
        orders: list[list[Task]] = [[] for _ in range(shape.num_meshes)]
        for visit in way:
            for microbatch in range(shape.num_microbatches):
                orders[visit.mesh] += (Task(s, microbatch, Phase.F) for s in visit.stages)
        for visit in reversed(way):
            for microbatch in range(shape.num_microbatches):
                orders[visit.mesh] += (Task(s, microbatch, Phase.B) for s in reversed(visit.stages))
        return orders

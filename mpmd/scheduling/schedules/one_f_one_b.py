"""1F1B: a microbatch's backward as early as possible; then one forward, one backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.placement import Visit, pipeline_positions
from mpmd.scheduling.task import Phase, Task


@dataclass(frozen=True)
class OneFOneB(PipelineSchedule):
    """Warm up with as many forwards as meshes follow, then alternate backward and forward.

    Idle per mesh ``(p-1)(F+B)`` as GPipe, but position ``r`` of ``p`` holds at most ``p-r`` microbatches.

    Source: Narayanan et al., PipeDream-Flush, 2021; Fan et al., DAPPLE, 2021.
    """

    name = "1f1b"
    warm_up_factor: ClassVar[int] = 1
    """How many forwards run first for each mesh that follows."""

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """Forwards first: as many as meshes follow, times the factor."""
        way = pipeline_positions(shape.placement, self.name)
        orders: list[list[Task]] = [[] for _ in range(shape.num_meshes)]
        for position, visit in enumerate(way):
            warm_up = self.warm_up_factor * (len(way) - 1 - position)
            orders[visit.mesh] = alternate(visit, warm_up, shape.num_microbatches)
        return orders


def alternate(visit: Visit, warm_up: int, num_microbatches: int) -> list[Task]:
    """``warm_up`` forwards, then forward and backward in turn, then the remaining backwards."""
    order: list[Task] = []
    for turn in range(-warm_up, num_microbatches):
        forward = turn + warm_up
        if forward < num_microbatches:
            order += (Task(s, forward, Phase.F) for s in visit.stages)
        if turn >= 0:
            order += (Task(s, turn, Phase.B) for s in reversed(visit.stages))
    return order

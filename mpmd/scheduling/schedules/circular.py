"""Circular: microbatches visit the meshes in rounds, in groups; all forwards, then all backwards."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.definition import PipelineShape
from mpmd.scheduling.placement import visits
from mpmd.scheduling.schedules.round_robin import RoundRobinSchedule
from mpmd.scheduling.task import Phase, Task


@dataclass(frozen=True)
class Circular(RoundRobinSchedule):
    """A group of as many microbatches as meshes passes all stages before the next group starts.

    Idle per mesh ``(p-1)(F+B)/v`` if the microbatches divide into whole groups.  Between rounds it holds the
    boundary activations of one group, where looped breadth first holds those of all microbatches.

    Attributes:
        degree: the number of rounds that the program must have; None: any.
        group: microbatches per group; None: as many as meshes.
        reversed_backward: backwards run in exactly the opposite order of forwards.

    Source: the wrap-around pipelines of MaxText and praxis.
    """

    degree: int | None = None
    group: int | None = None
    reversed_backward: bool = False

    name = "circular"
    instead = "gpipe"

    def __post_init__(self) -> None:
        if self.group is not None and self.group < 1:
            raise ScheduleError(f"schedule 'circular': group must be at least 1, got {self.group}")

    def orders(self, shape: PipelineShape) -> list[list[Task]]:
        """Forwards by group, round and microbatch; backwards by group, reversed round and microbatch.

        Raises:
            ScheduleError: the placement does not visit each mesh `degree` times.
        """
        way = visits(shape.placement)
        meshes = len({visit.mesh for visit in way})
        if self.degree is not None and len(way) != self.degree * meshes:
            raise ScheduleError(
                f"schedule 'circular' with degree {self.degree} visits {meshes} meshes {self.degree} times "
                f"each, but the placement makes {len(way)} visits\n"
                f"  use {self.degree * meshes} stages, or leave the degree out"
            )
        size = self.group or meshes
        starts = range(0, shape.num_microbatches, size)
        groups = [range(start, min(start + size, shape.num_microbatches)) for start in starts]
        orders: list[list[Task]] = [[] for _ in range(shape.num_meshes)]
        for together in groups:
            for visit in way:
                for microbatch in together:
                    orders[visit.mesh] += (Task(s, microbatch, Phase.F) for s in visit.stages)
        for together in reversed(groups) if self.reversed_backward else groups:
            for visit in reversed(way):
                for microbatch in reversed(together) if self.reversed_backward else together:
                    orders[visit.mesh] += (Task(s, microbatch, Phase.B) for s in reversed(visit.stages))
        return orders

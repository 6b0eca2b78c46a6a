"""What schedules have in common that visit every mesh several times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.placement import Placement, looped, visits_of_mesh


@dataclass(frozen=True)
class RoundRobinSchedule(PipelineSchedule):
    """A schedule over several stages per mesh, placed round-robin."""

    instead: ClassVar[str]
    """The schedule that does the same where a mesh has one stage."""

    def placement(self, num_stages: int, num_meshes: int) -> Placement:
        """Round-robin."""
        return looped(num_stages, num_meshes)

    def remarks(self, shape: PipelineShape) -> list[str]:
        """Whether there are rounds at all."""
        if any(count > 1 for count in visits_of_mesh(shape.placement).values()):
            return []
        return [
            f"schedule {self.name!r} comes to every mesh several times, but here to each once: it has "
            "nothing to interleave\n  give each mesh several stages that are not neighbours, "
            f"or use {self.instead}"
        ]

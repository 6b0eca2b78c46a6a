"""Looped breadth first: all microbatches through one round of meshes before the next round."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.scheduling.definition import PipelineShape
from mpmd.scheduling.placement import Placement, looped, nothing_to_loop
from mpmd.scheduling.schedules.gpipe import GPipe


@dataclass(frozen=True)
class LoopedBFS(GPipe):
    """GPipe on a pipeline that visits the meshes in several rounds.

    Idle per mesh ``(p-1)(F+B)/v`` for ``v`` stages per mesh; holds the activations of every microbatch.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023.
    """

    name = "looped_bfs"

    def placement(self, num_stages: int, num_meshes: int) -> Placement:
        """Round-robin."""
        return looped(num_stages, num_meshes)

    def remarks(self, shape: PipelineShape) -> list[str]:
        """Whether there are rounds at all."""
        return nothing_to_loop(shape.placement, self.name, "gpipe")

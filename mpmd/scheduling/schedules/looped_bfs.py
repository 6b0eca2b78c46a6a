"""Looped breadth first: all microbatches through one round of meshes before the next round."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.scheduling.placement import Placement, looped
from mpmd.scheduling.schedules.gpipe import GPipe


@dataclass(frozen=True)
class LoopedBFS(GPipe):
    """GPipe on a pipeline that goes round the meshes several times.

    Idle per mesh ``(p-1)(F+B)/v`` for ``v`` stages per mesh; holds the activations of every microbatch.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023.
    """

    name = "looped_bfs"

    def placement(self, num_stages: int, num_meshes: int) -> Placement:
        """Round and round."""
        return looped(num_stages, num_meshes)

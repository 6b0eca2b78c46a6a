"""Looped breadth first: all microbatches through one round of meshes before the next round."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.scheduling.schedules.gpipe import GPipe
from mpmd.scheduling.schedules.round_robin import RoundRobinSchedule


@dataclass(frozen=True)
class LoopedBFS(RoundRobinSchedule, GPipe):
    """GPipe on a pipeline that visits the meshes in several rounds.

    Idle per mesh ``(p-1)(F+B)/v`` for ``v`` stages per mesh; holds the activations of every microbatch.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023.
    """

    name = "looped_bfs"
    instead = "gpipe"

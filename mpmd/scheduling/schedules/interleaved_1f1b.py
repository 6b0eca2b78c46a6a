"""Interleaved 1F1B: several stages per mesh, so that the pipeline fills faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.definition import PipelineShape
from mpmd.scheduling.schedules.round_robin import RoundRobinSchedule
from mpmd.scheduling.task import Task
from mpmd.scheduling.workload import expand, unit_workload
from mpmd.scheduling.zigzag import best_order, zigzag


@dataclass(frozen=True)
class Interleaved1F1B(RoundRobinSchedule):
    """1F1B over ``v`` stages per mesh, placed round-robin.

    Idle per mesh ``(p-1)(F+B)/v``; position ``r`` of ``p`` holds ``(v-1)p + 2(p-1-r) + 1`` stages'
    activations of a microbatch.  Where microbatches or stages do not divide evenly, the order comes from
    list scheduling within the same memory.

    Attributes:
        extra_warm_up: more forwards before the first backward; one hides transfers (the order of Kimi K2).
        group: microbatches that pass a stage together; None: as many as meshes.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021.
    """

    extra_warm_up: int = 0
    group: int | None = None

    name = "interleaved_1f1b"
    instead = "1f1b"

    def __post_init__(self) -> None:
        if self.extra_warm_up < 0 or (self.group is not None and self.group < 1):
            raise ScheduleError(
                "schedule 'interleaved_1f1b': extra_warm_up must not be negative and group at least 1, "
                f"got {self.extra_warm_up} and {self.group}"
            )

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """``(v-1)p + 2(p-1-r)`` forwards first, where ``r`` is the position of the mesh in the pipeline."""
        workload = unit_workload(shape, splits=False)
        meshes = len({chain.mesh for chain in workload.chains})
        size = self.group or meshes

        def warm_up(place: int, chains: int) -> int:
            return (chains - 1) * size + 2 * (meshes - 1 - place) + self.extra_warm_up

        return expand(workload, best_order(workload, zigzag(workload, warm_up, size)).orders)

"""Interleaved zero bubble: several stages per mesh, weight gradients in the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.definition import PipelineShape
from mpmd.scheduling.schedules.round_robin import RoundRobinSchedule
from mpmd.scheduling.task import Task
from mpmd.scheduling.workload import expand, limits, unit_workload
from mpmd.scheduling.zigzag import best_order, zigzag


@dataclass(frozen=True)
class InterleavedZeroBubble(RoundRobinSchedule):
    """Zero bubble H1 over ``v`` stages per mesh, placed round-robin.

    Idle per mesh ``(p-1)(F+I-W)/v``; every mesh holds at most ``p`` microbatches.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, on the order of interleaved 1F1B.
    """

    name = "interleaved_zb"
    instead = "zb_h1"
    splits_backward = True

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """``(v-1)p + p-1-r`` forwards first, where ``r`` is the position of the mesh in the pipeline."""
        workload = unit_workload(shape, splits=True)
        meshes = len({chain.mesh for chain in workload.chains})

        def warm_up(place: int, chains: int) -> int:
            return (chains - 1) * meshes + meshes - 1 - place

        return expand(workload, best_order(workload, zigzag(workload, warm_up), limits(shape, meshes)).orders)

"""Eager 1F1B: twice the forwards ahead, so that transfers have time to arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.placement import pipeline_positions
from mpmd.scheduling.schedules.one_f_one_b import alternate
from mpmd.scheduling.task import Task


@dataclass(frozen=True)
class EagerOneFOneB(PipelineSchedule):
    """1F1B with twice the warm-up: a transfer may take as long as a task without a wait.

    Idle as 1F1B when transfers are instant; position ``r`` of ``p`` holds ``min(m, 2(p-r)-1)`` microbatches.

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, 2022.
    """

    name = "eager_1f1b"

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """``2(p-1-r)`` forwards first, where ``r`` is the position of the mesh in the pipeline."""
        way = pipeline_positions(shape.placement, self.name)
        orders: list[list[Task]] = [[] for _ in range(shape.num_meshes)]
        for position, visit in enumerate(way):
            orders[visit.mesh] = alternate(visit, 2 * (len(way) - 1 - position), shape.num_microbatches)
        return orders

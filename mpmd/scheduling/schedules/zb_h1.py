"""ZB-H1: 1F1B with the weight gradients used to fill the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.placement import pipeline_positions
from mpmd.scheduling.task import Task
from mpmd.scheduling.workload import expand, limits, unit_workload
from mpmd.scheduling.zigzag import best_order, zigzag


@dataclass(frozen=True)
class ZeroBubbleH1(PipelineSchedule):
    """1F1B whose weight gradients wait until the mesh would idle, within the memory of 1F1B's first mesh.

    Idle per mesh ``(p-1)(F+I-W)``; every mesh holds at most ``p`` microbatches.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
    """

    name = "zb_h1"
    splits_backward = True

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """``p-1-r`` forwards first, where ``r`` is the position of the mesh in the pipeline."""
        pipeline_positions(shape.placement, self.name)
        workload = unit_workload(shape, splits=True)
        meshes = len(workload.chains)
        pattern = zigzag(workload, lambda place, chains: meshes - 1 - place)
        return expand(workload, best_order(workload, pattern, limits(shape, meshes)).orders)

"""DualPipe: two copies of every stage, microbatches enter at both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.list_schedule import backward_first, forward_first, list_schedule, old_first
from mpmd.scheduling.placement import pipeline_positions
from mpmd.scheduling.table import Mirror
from mpmd.scheduling.task import Task
from mpmd.scheduling.workload import expand, unit_workload


@dataclass(frozen=True)
class DualPipe(PipelineSchedule):
    """Each mesh holds a stage and the stage of its mirror mesh; half of the microbatches flow either way.

    Idle per mesh at most ``(p/2-1)(F+I)``; every mesh holds ``p+1`` microbatches of half of its stages and
    twice the parameters.  The gradients of the two copies of a stage must be added at the end of the step.

    Source: DeepSeek-V3 Technical Report, 2024.
    """

    name = "dualpipe"
    splits_backward = True

    def mirror(self, shape: PipelineShape) -> Mirror:
        """Stages in the opposite order of meshes, for the second half of the microbatches."""
        way = pipeline_positions(shape.placement, self.name)
        meshes = [visit.mesh for visit in way]
        opposite = dict(zip(meshes, reversed(meshes), strict=True))
        placement = tuple(opposite[mesh] for mesh in shape.placement)
        return Mirror(placement, (shape.num_microbatches + 1) // 2)

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """List scheduling of both directions together, in the memory of the published order."""
        mirror = self.mirror(shape).stage_to_mesh
        workload = unit_workload(shape, splits=True, mirror=mirror)
        most = len(pipeline_positions(shape.placement, self.name)) + 1
        limits = []
        for mesh in range(shape.num_meshes):
            copies = shape.placement.count(mesh), mirror.count(mesh)
            limits.append(max(most * sum(copies) // 2, *copies))
        found = [
            list_schedule(workload, limits, priority)
            for priority in (backward_first, old_first, forward_first)
        ]
        return expand(workload, min(found, key=lambda ordered: ordered.makespan_s).orders)

"""DualPipe: two copies of the stages, in opposite directions; and its form with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.list_schedule import backward_first, forward_first, list_schedule, old_first
from mpmd.scheduling.schedules.v_shaped import VShaped
from mpmd.scheduling.table import Mirror, Task, pipeline_positions
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


@dataclass(frozen=True)
class DualPipeV(VShaped):
    """The V-shaped half of DualPipe: half a microbatch more of memory than ``zb_v``.

    Idle per mesh ``p-1`` tasks of one stage; every mesh holds at most ``p+1/2`` microbatches.

    Source: DeepSeek, DualPipe, 2025; Liu et al., the halving procedure.
    """

    name = "dualpipe_v"

    def limit(self, num_meshes: int) -> int:
        """``2p+1``."""
        return 2 * num_meshes + 1

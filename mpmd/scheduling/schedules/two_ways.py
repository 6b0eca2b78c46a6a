"""Two stages for each mesh: down the meshes and up again, or from both ends at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.list_schedule import backward_first, forward_first, list_schedule, old_first
from mpmd.scheduling.patterns import (
    V_HALF_PATTERNS,
    V_MIN_PATTERNS,
    VPattern,
    is_v_shaped,
    pattern_candidates,
)
from mpmd.scheduling.table import Mirror, Placement, Task, contiguous, pipeline_positions
from mpmd.scheduling.workload import expand, limits, unit_workload


class VShaped(PipelineSchedule):
    """Stages go down the meshes and up again, so that every mesh holds an early and a late stage.

    The memory limit is the same number of microbatches on all meshes, whatever their stages.  The order is
    the best of some repeating patterns and of list scheduling; on other placements than the V, of list
    scheduling alone.
    """

    splits_backward = True
    patterns: tuple[VPattern, ...] = ()

    @abstractmethod
    def limit(self, num_meshes: int) -> int:
        """The most activations that a mesh may hold, in halves of its stages for one microbatch."""

    def placement(self, num_stages: int, num_meshes: int) -> Placement:
        """Down and up again, with neighbouring stages together where there are more than two per mesh.

        Raises:
            ScheduleError: there are fewer than two stages per mesh.
        """
        self._check_count(num_stages, num_meshes)
        way = [*range(num_meshes), *reversed(range(num_meshes))]
        return tuple(way[part] for part in contiguous(num_stages, 2 * num_meshes))

    def _check_count(self, num_stages: int, num_meshes: int) -> None:
        if num_stages < 2 * num_meshes:
            raise ScheduleError(
                f"schedule {self.name!r} needs two stages per mesh: {2 * num_meshes} for {num_meshes} "
                f"meshes, got {num_stages}\n  split the model into more stages, or use zb_h1"
            )

    def remarks(self, shape: PipelineShape) -> list[str]:
        """Whether the placement is the V."""
        workload = unit_workload(shape, splits=True, split_turns=True)
        meshes = list(dict.fromkeys(chain.mesh for chain in workload.chains))
        if len(meshes) == 1 or [chain.mesh for chain in workload.chains] == meshes + meshes[::-1]:
            return []
        return [
            f"schedule {self.name!r} goes down the meshes and up again, but the stages are on meshes "
            f"{', '.join(map(str, shape.placement))}: it keeps its memory limit, but not its order\n"
            f"  place them as {', '.join(map(str, [*meshes, *reversed(meshes)]))}"
        ]

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """The fastest order within the limit.

        Raises:
            ScheduleError: there are fewer than two stages per mesh, or one of several meshes is visited once.
        """
        workload = unit_workload(shape, splits=True, split_turns=True)
        used = len({chain.mesh for chain in workload.chains})
        self._check_count(shape.num_stages, used)
        for mesh in dict.fromkeys(shape.placement):
            if used > 1 and len(workload.chains_on(mesh)) < 2:
                raise ScheduleError(
                    f"schedule {self.name!r} goes down the meshes and up again, but visits mesh {mesh} once\n"
                    f"  stages are on meshes {', '.join(map(str, shape.placement))}\n"
                    "  place them such as 0, 1, 1, 0, or use zb_h1"
                )
        most = limits(shape, self.limit(used) / 2)
        candidates = [list_schedule(workload, most, priority) for priority in (backward_first, old_first)]
        if is_v_shaped(workload):
            candidates += pattern_candidates(workload, self.patterns, most)
        return expand(workload, min(candidates, key=lambda ordered: ordered.makespan_s).orders)


@dataclass(frozen=True)
class ZeroBubbleV(VShaped):
    """The memory of 1F1B, no idle time between a mesh's first and last task.

    Idle per mesh at most ``(p-1)F`` of one stage; every mesh holds at most ``p`` microbatches.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
    """

    name = "zb_v"

    def limit(self, num_meshes: int) -> int:
        """Twice ``p``."""
        return 2 * num_meshes


@dataclass(frozen=True)
class VHalf(VShaped):
    """Half the memory of 1F1B.

    Idle per mesh ``3p-7`` tasks of one stage; every mesh holds at most ``(p+2)//2`` microbatches.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
    """

    name = "v_half"
    patterns = V_HALF_PATTERNS

    def limit(self, num_meshes: int) -> int:
        """Twice ``(p+2)//2``."""
        return 2 * ((num_meshes + 2) // 2)


@dataclass(frozen=True)
class VMin(VShaped):
    """A third of the memory of 1F1B.

    Idle per mesh at most ``4p-5`` tasks of one stage when all tasks take equally long, more when they do not;
    every mesh holds at most ``(p+4)//3`` microbatches.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
    """

    name = "v_min"
    patterns = V_MIN_PATTERNS

    def limit(self, num_meshes: int) -> int:
        """Twice ``(p+4)//3``."""
        return 2 * ((num_meshes + 4) // 3)


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
        most_on_mesh = []
        for mesh in range(shape.num_meshes):
            copies = shape.placement.count(mesh), mirror.count(mesh)
            most_on_mesh.append(max(most * sum(copies) // 2, *copies))
        candidates = [
            list_schedule(workload, most_on_mesh, priority)
            for priority in (backward_first, old_first, forward_first)
        ]
        return expand(workload, min(candidates, key=lambda ordered: ordered.makespan_s).orders)


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

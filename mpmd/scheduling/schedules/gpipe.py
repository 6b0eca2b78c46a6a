"""GPipe, and the schedules that send microbatches through a mesh's stages in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.definition import PipelineSchedule, PipelineShape, RoundRobinSchedule
from mpmd.scheduling.schedules.one_f_one_b import alternate
from mpmd.scheduling.table import Phase, Task, visits


@dataclass(frozen=True)
class Circular(RoundRobinSchedule):
    """A group of as many microbatches as meshes passes all stages before the next group starts.

    Idle per mesh ``(p-1)(F+B)/v`` if the microbatches divide into whole groups.  Between rounds it holds the
    boundary activations of one group; looped breadth first holds them for all microbatches.

    Attributes:
        degree: the number of rounds that the program must have; None: any.
        group: microbatches per group; None: as many as meshes.
        reversed_backward: backwards run in exactly the opposite order of forwards.

    Source: the wrap-around pipelines of MaxText and praxis.
    """

    degree: int | None = None
    group: int | None = None
    reversed_backward: bool = False

    name = "circular"
    instead = "gpipe"

    def __post_init__(self) -> None:
        if self.group is not None and self.group < 1:
            raise ScheduleError(f"schedule 'circular': group must be at least 1, got {self.group}")

    def orders(self, shape: PipelineShape) -> list[list[Task]]:
        """Forwards by group, round and microbatch; backwards by group, reversed round and microbatch.

        Raises:
            ScheduleError: the placement does not visit each mesh `degree` times.
        """
        way = visits(shape.placement)
        meshes = len({visit.mesh for visit in way})
        if self.degree is not None and len(way) != self.degree * meshes:
            raise ScheduleError(
                f"schedule 'circular' with degree {self.degree} visits {meshes} meshes {self.degree} times "
                f"each, but the placement makes {len(way)} visits\n"
                f"  use {self.degree * meshes} stages, or leave the degree out"
            )
        size = self.group or meshes
        starts = range(0, shape.num_microbatches, size)
        groups = [range(start, min(start + size, shape.num_microbatches)) for start in starts]
        orders: list[list[Task]] = [[] for _ in range(shape.num_meshes)]
        for together in groups:
            for visit in way:
                for microbatch in together:
                    orders[visit.mesh] += (Task(s, microbatch, Phase.F) for s in visit.stages)
        for together in reversed(groups) if self.reversed_backward else groups:
            for visit in reversed(way):
                for microbatch in reversed(together) if self.reversed_backward else together:
                    orders[visit.mesh] += (Task(s, microbatch, Phase.B) for s in reversed(visit.stages))
        return orders


@dataclass(frozen=True)
class GPipe(PipelineSchedule):
    """All forwards of the step, then all backwards.

    Idle per mesh ``(p-1)(F+B)``; holds the activations of every microbatch.  A mesh that is visited several
    times finishes one visit for all microbatches before the next.

    Attributes:
        last_mesh_1f1b: the last mesh takes each backward as soon as it can; the others stay as they are.

    Source: Huang et al., GPipe, 2019.
    """

    last_mesh_1f1b: bool = False

    name = "gpipe"

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """As ``circular``, with all microbatches in one group."""
        way, orders = visits(shape.placement), Circular(group=shape.num_microbatches).orders(shape)
        if self.last_mesh_1f1b:
            if any(visit.mesh == way[-1].mesh for visit in way[:-1]):
                raise ScheduleError(
                    f"schedule {self.name!r} with last_mesh_1f1b comes to mesh {way[-1].mesh} only at the "
                    "end, but it holds earlier stages too\n  leave last_mesh_1f1b out"
                )
            orders[way[-1].mesh] = alternate(way[-1], 0, shape.num_microbatches)
        return orders


@dataclass(frozen=True)
class LoopedBFS(RoundRobinSchedule, GPipe):
    """GPipe on a pipeline that visits the meshes in several rounds.

    Idle per mesh ``(p-1)(F+B)/v`` for ``v`` stages per mesh; holds the activations of every microbatch.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023.
    """

    name = "looped_bfs"
    instead = "gpipe"


@dataclass(frozen=True)
class ForwardOnly(PipelineSchedule):
    """Microbatches one after the other; on a round-robin placement, in groups as ``circular``.

    Idle per mesh ``(p-1)F/v``; holds no activations after a stage.
    """

    name = "forward_only"
    has_backward = False

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """The forwards of ``circular``."""
        return [[task for task in order if not task.phase.is_backward] for order in Circular().orders(shape)]

"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.placement import visits
from mpmd.scheduling.schedules.circular import Circular
from mpmd.scheduling.schedules.one_f_one_b import alternate
from mpmd.scheduling.task import Task


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
        """Those of ``circular`` with all microbatches in one group."""
        way, orders = visits(shape.placement), Circular(group=shape.num_microbatches).orders(shape)
        if self.last_mesh_1f1b:
            if any(visit.mesh == way[-1].mesh for visit in way[:-1]):
                raise ScheduleError(
                    f"schedule {self.name!r} with last_mesh_1f1b comes to mesh {way[-1].mesh} only at the "
                    "end, but it holds earlier stages too\n  leave last_mesh_1f1b out"
                )
            orders[way[-1].mesh] = alternate(way[-1], 0, shape.num_microbatches)
        return orders

"""ZB-H2: no mesh idles between its first task and its last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.placement import pipeline_positions
from mpmd.scheduling.task import Task
from mpmd.scheduling.workload import expand, limits, unit_workload
from mpmd.scheduling.zigzag import best_order, zigzag


@dataclass(frozen=True)
class ZeroBubbleH2(PipelineSchedule):
    """Twice the forwards ahead: no mesh idles between its first and its last task.

    The step still takes ``(p-1)F`` more than a mesh's work, since the last mesh begins late; where steps
    follow each other without a barrier that, too, disappears.  Every mesh holds at most ``2p-1``
    microbatches.

    Attributes:
        latency: seconds of a transfer in forwards; each adds as many forwards again to the warm-up.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
    """

    latency: float = 0.0

    name = "zb_h2"
    splits_backward = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.latency < math.inf:
            raise ScheduleError(
                f"schedule 'zb_h2': latency must be finite and not negative, got {self.latency}"
            )

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """``2(p-1-r)(1+latency)`` forwards first, where ``r`` is the position of the mesh in the pipeline."""
        pipeline_positions(shape.placement, self.name)
        workload = unit_workload(shape, splits=True)
        meshes = len(workload.chains)

        def warm_up(place: int, chains: int) -> int:
            return math.floor(2 * (meshes - 1 - place) * (1 + self.latency))

        pattern = zigzag(workload, warm_up)
        most = limits(shape, warm_up(0, 1) + 1)
        return expand(workload, best_order(workload, pattern, most).orders)

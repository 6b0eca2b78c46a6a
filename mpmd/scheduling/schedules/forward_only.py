"""Forward only: evaluation and inference in microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.schedules.circular import Circular
from mpmd.scheduling.task import Task


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

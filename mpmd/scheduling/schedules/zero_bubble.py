"""Zero-bubble schedules: weight gradients are computed where a mesh would idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.definition import PipelineSchedule, PipelineShape, RoundRobinSchedule
from mpmd.scheduling.patterns import best_order, zigzag
from mpmd.scheduling.table import Task, pipeline_positions
from mpmd.scheduling.workload import expand, limits, unit_workload


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

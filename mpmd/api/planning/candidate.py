"""One way to run a step on some devices, with its prediction."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from mpmd.scheduling.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class PlanChoice:
    """What a plan chooses.

    Attributes:
        microbatches: of a step.
        axes: of each mesh, and their sizes.
        placement: the number of the mesh of each stage.
        schedule: its name.
        rematerialise: whether each stage computes its forward again in the backward.
        starts: the first units of all stages but the first.
        exchanges: options that differ from one reduction and one gather in a step, and their values.
    """

    microbatches: int
    axes: tuple[tuple[str, int], ...]
    placement: tuple[int, ...]
    schedule: str
    rematerialise: bool
    starts: tuple[int, ...]
    exchanges: tuple[tuple[str, str], ...] = ()

    @property
    def meshes(self) -> int:
        return max(self.placement) + 1

    @functools.cached_property
    def devices(self) -> int:
        count = 1
        for _, size in self.axes:
            count *= size
        return count


@dataclasses.dataclass(frozen=True)
class PlanCandidate:
    """A choice with its prediction.

    Attributes:
        choice: stages, meshes and schedule.
        step_s: predicted seconds of a step; infinite where nothing can be predicted.
        bubble: the part of the step in which meshes wait, over all meshes.
        peak_bytes: for each mesh, the bytes that each of its devices holds at most.
        held: for each mesh, the bytes of each kind at the peak, over its devices.
        sent_bytes: bytes of a step between meshes.
        timeline: the predicted one.
        refused: why it cannot be used; "" if it can.
        is_measured: whether the seconds are from measured fragments.
        is_partitioned: whether seconds and bytes are of the program that it runs.
    """

    choice: PlanChoice
    step_s: float
    bubble: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    held: tuple[dict[str, int], ...] = ()
    sent_bytes: int = 0
    timeline: Timeline | None = None
    refused: str = ""
    is_measured: bool = False
    is_partitioned: bool = False

    @property
    def order(self) -> tuple[Any, ...]:
        """What plans are ranked by: seconds, then fewer bytes, then fewer of everything."""
        choice = self.choice
        return (
            bool(self.refused),
            not self.is_measured,
            not self.is_partitioned,
            self.step_s,
            max(self.peak_bytes, default=0),
            choice.rematerialise,
            len(choice.placement),
            choice.microbatches,
            choice.schedule,
            choice.axes,
            choice.exchanges,
        )

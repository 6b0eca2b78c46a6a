"""Costs of tasks and transfers: seconds and bytes, counted in units, estimated or measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpmd.brief import brief
from mpmd.errors import ScheduleError
from mpmd.scheduling.table import Phase, Task


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage, per microbatch unless said otherwise; bytes are per mesh, all its devices together.

    Attributes:
        forward_s: seconds of ``F``.
        backward_s: seconds of a whole backward ``B``.
        input_gradient_s: seconds of ``I``.
        weight_gradient_s: seconds of ``W``.
        output_bytes: the output of ``F``, for the next stage.
        input_gradient_bytes: the output of ``B`` or ``I``, for the previous stage.
        residual_bytes: held from ``F`` until the backward is over.
        weight_residual_bytes: held between ``I`` and ``W``; None: the same residuals.
        workspace_bytes: temporaries while a task of the stage runs.
        parameter_bytes: parameters and optimizer state, the whole step.
        gradient_bytes: the gradient accumulator, from the first backward to the end of the step.
        batch_bytes: data that the stage reads: that of all microbatches until the mesh begins, and for each
            microbatch until its last task.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    input_gradient_s: float = 1.0
    weight_gradient_s: float = 1.0
    output_bytes: int = 0
    input_gradient_bytes: int = 0
    residual_bytes: int = 0
    weight_residual_bytes: int | None = None
    workspace_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    batch_bytes: int = 0

    __repr__ = brief

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ScheduleError(f"stage cost {field} must be finite and not negative, got {value!r}")

    def seconds(self, phase: Phase) -> float:
        """Seconds of one task."""
        match phase:
            case Phase.F:
                return self.forward_s
            case Phase.B:
                return self.backward_s
            case Phase.I:
                return self.input_gradient_s
            case Phase.W:
                return self.weight_gradient_s

    @property
    def bytes_between_halves(self) -> int:
        """Bytes held between ``I`` and ``W``."""
        return self.residual_bytes if self.weight_residual_bytes is None else self.weight_residual_bytes


@dataclass(frozen=True)
class Skip:
    """A value that goes from one stage to a later one that is not the next, and its gradient back."""

    source: int
    target: int
    nbytes: int = 0

    __repr__ = brief


@dataclass(frozen=True)
class Costs:
    """Costs of a program: one record per stage, and connections that skip stages."""

    stages: tuple[StageCosts, ...]
    skips: tuple[Skip, ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        for skip in self.skips:
            if not 0 <= skip.source < skip.target - 1 < len(self.stages) - 1:
                raise ScheduleError(
                    f"skip connection from stage {skip.source} to stage {skip.target}: expected a "
                    f"stage and a later one that is not the next, both within 0 to {len(self.stages) - 1}"
                )

    @staticmethod
    def unit(num_stages: int) -> Costs:
        """A forward takes 1 second, a whole backward 2, each half of it 1; nothing has a size."""
        return Costs((StageCosts(),) * num_stages)

    @staticmethod
    def uniform(num_stages: int, stage: StageCosts) -> Costs:
        return Costs((stage,) * num_stages)

    def seconds(self, task: Task) -> float:
        """Seconds of one task."""
        return self.stages[task.stage].seconds(task.phase)

    def message_bytes(self, source: Task, target: Task) -> int:
        """Bytes that go from one task to another that needs it."""
        for skip in self.skips:
            if {source.stage, target.stage} == {skip.source, skip.target}:
                return skip.nbytes
        stage = self.stages[source.stage]
        return stage.output_bytes if source.phase is Phase.F else stage.input_gradient_bytes


@dataclass(frozen=True)
class Link:
    """The cost of moving bytes from one mesh to another.

    Attributes:
        latency_s: seconds from the last byte leaving to the value being usable; the link is free meanwhile.
        bytes_per_s: bandwidth; while a message is on the wire the link is busy.
        occupied_s: seconds a message occupies the link on top of its bytes.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    occupied_s: float = 0.0

    __repr__ = brief

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.occupied_s >= 0 and self.bytes_per_s > 0):
            raise ScheduleError(
                f"{self}: latency_s and occupied_s must not be negative and bytes_per_s must be positive"
            )

    def wire_s(self, nbytes: int) -> float:
        """Seconds for which a message occupies the link."""
        return self.occupied_s + nbytes / self.bytes_per_s


Transfer = Link | Mapping[tuple[int, int], Link] | Callable[[int, int], Link]
"""One link for all pairs of meshes, or one per (source mesh, target mesh)."""


def link_between(transfer: Transfer, source: int, target: int) -> Link:
    """The link from one mesh to another.

    Raises:
        ScheduleError: a mapping has no entry for the pair.
    """
    if isinstance(transfer, Link):
        return transfer
    if isinstance(transfer, Mapping):
        if (source, target) not in transfer:
            raise ScheduleError(
                f"no link is given from mesh {source} to mesh {target}, but the schedule sends there\n"
                f"  links are given for {sorted(transfer)}"
            )
        return transfer[source, target]
    return transfer(source, target)

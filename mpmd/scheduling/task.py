"""The unit that schedules order: one phase of one stage on one microbatch."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from mpmd.errors import ScheduleError


class Phase(enum.Enum):
    """The work of a task for its stage.

    ``B`` is the whole backward.  A split backward is ``I``, which produces the input of the previous stage's
    backward, followed at any later time by ``W``, whose results stay on the mesh.
    """

    F = "F"  # forward
    B = "B"  # whole backward
    I = "I"  # gradient of the stage's input: the half that keeps its position when a backward is split
    W = "W"  # gradient of the stage's weights: the half that may come later

    @property
    def is_backward(self) -> bool:
        """True for everything but the forward."""
        return self is not Phase.F

    @property
    def sends_gradient(self) -> bool:
        """True for the phases whose result the previous stage's backward needs."""
        return self is Phase.B or self is Phase.I


_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class Task:
    """One phase of one stage on one microbatch; ``0F2`` is the forward of stage 0 on microbatch 2."""

    stage: int
    microbatch: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Task:
        """The task written ``text``: stage, phase letter, microbatch, as in ``1B0``.

        Raises:
            ScheduleError: the text is not a task.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text.strip()!r} is not a task\n"
                "  expected: stage, one of the phases F B I W, microbatch; for example 0F0, 1B3 or 2W1"
            )
        return Task(int(match[1]), int(match[3]), Phase(match[2]))

"""How spans look in every picture: colours of phases, and the text of times.

The colours are those of Okabe and Ito, lightened where text is written on them, so that readers who see fewer
colours can distinguish them.

Source: Okabe and Ito, Color Universal Design, 2008.
"""

from __future__ import annotations

import re

from mpmd.scheduling.timeline import Span, Timeline

COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#f0c860", "W": "#2fb389", "": "#c9a0c0"}
"""Fill per phase; the empty phase is for spans without a task, such as the optimizer."""
CURVE_COLOUR = "#0072b2"
"""Of a curve that is not of a phase, such as the loss."""
TRANSFER_COLOUR, IDLE_COLOUR, INK = "#8a94a6", "#eef0f3", "#10151d"

MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "": "optimizer and others",
}

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def phase_of(span: Span) -> str:
    """The letter of the phase of a span's task, "" without a task."""
    return span.task.phase.value if span.task is not None else ""


def phases_of(*timelines: Timeline) -> list[str]:
    """The phases that occur, in the order of the table."""
    found = {
        phase_of(s) for timeline in timelines for mesh in timeline.meshes for s in timeline.compute(mesh)
    }
    return [phase for phase in COLOURS if phase in found]


_EXCHANGE = re.compile(r"p\d+_(reduce|gather)\.")
"""Names of programs that only exchange values between the devices of a mesh."""


def label_of(span: Span, with_stage: bool) -> str:
    """`B0`, with the stage before it where a mesh holds several; what a span without a task does."""
    if span.task is None:
        exchange = _EXCHANGE.match(span.name)
        return span.name if exchange is None else exchange[1]
    return f"{span.task.stage if with_stage else ''}{phase_of(span)}{span.task.microbatch}"


def has_several_stages(timeline: Timeline, mesh: str) -> bool:
    """Whether a mesh holds several stages, so that labels need theirs."""
    return len({span.task.stage for span in timeline.compute(mesh) if span.task is not None}) > 1


def unit_of(timeline: Timeline) -> tuple[float, str]:
    """The unit for the times of a timeline: its size in seconds, and its name."""
    if timeline.in_steps:
        return 1.0, "steps"
    return next(((u, name) for u, name in _UNITS if timeline.makespan_s >= u), _UNITS[-1])


def duration(timeline: Timeline, seconds: float) -> str:
    """A time of a timeline as text: `33 steps`, `12.5 ms`."""
    unit, name = unit_of(timeline)
    return f"{seconds / unit:.6g} {name}"

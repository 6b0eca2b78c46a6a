"""Schedules and timelines as text, and how tasks look in every picture."""

from __future__ import annotations

import re

from mpmd.scheduling.table import Task
from mpmd.scheduling.timeline import Span, Timeline

COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#f0c860", "W": "#2fb389", "": "#c9a0c0"}
"""Fill per phase; the empty phase is for spans without a task, such as the optimizer.

A span of two phases, `FB`, has both: the forward's above.
"""
UPPER_PART = 0.3
"""The part of the height of such a span that is its forward; the label has room below."""
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
    """The letter of the phase of a span's task, two if it computes a forward too, "" without a task."""
    if span.task is None:
        return ""
    return f"{'F' if span.with_forward else ''}{span.task.phase.value}"


def fills_of(phase: str) -> list[str]:
    """The colours of a phase, from above."""
    return [COLOURS[letter] for letter in phase] or [COLOURS[""]]


def meaning_of(phase: str) -> str:
    return " and ".join(MEANING[letter] for letter in phase) or MEANING[""]


def phases_of(*timelines: Timeline) -> list[str]:
    """The phases that occur, in the order of the table, with two behind their first."""
    drawn = {
        phase_of(s) for timeline in timelines for mesh in timeline.meshes for s in timeline.compute(mesh)
    }
    order = list(COLOURS)
    return sorted(drawn, key=lambda phase: [order.index(p) for p in phase] or [len(order)])


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
    """A time of a timeline as text, in the unit that suits it: `33 steps`, `12.5 ms`, `168 µs`."""
    if timeline.in_steps:
        return f"{seconds:.6g} steps"
    unit, name = next(((u, n) for u, n in _UNITS if abs(seconds) >= u), _UNITS[-1])
    if not seconds:
        unit, name = unit_of(timeline)
    return f"{seconds / unit:.4g} {name}" if seconds < 1000 else f"{seconds:,.0f} s"


def bytes_text(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.1f}".removesuffix(".0") + f" {unit}"


_MIN_COLUMNS = 3  # width of the shortest task, if the chart may be wide enough


def render_text(timeline: Timeline, width: int = 150) -> str:
    """The timeline as a chart for a terminal.

    A task is ``[F0  ]`` as wide as it is long: phase and microbatch, with the stage before it where a mesh
    holds several.  Dots are idle.  Tasks too short for their text show the letter of their phase.

    Args:
        timeline: the timeline to draw.
        width: columns for the lanes, at most.
    """
    if not timeline.makespan_s:
        return "(nothing ran)\n"
    several = {mesh: has_several_stages(timeline, mesh) for mesh in timeline.meshes}
    per_second = _columns_per_second(timeline, width, several)
    margin = max(map(len, timeline.meshes))
    lines = [timeline.title] if timeline.title else []
    for mesh in timeline.meshes:
        lane = ["."] * round(timeline.makespan_s * per_second)
        for span in timeline.compute(mesh):
            left, right = (round((t - timeline.begin_s) * per_second) for t in (span.start_s, span.end_s))
            lane[left:right] = _cell(label_of(span, several[mesh]), span, right - left)
        lines.append(f"{mesh:<{margin}} |{''.join(lane)}| idle {timeline.bubble_fraction(mesh):6.1%}")
    unit, name = unit_of(timeline)
    one = "step" if timeline.in_steps else name
    lines.append(
        f"{'':<{margin}} {duration(timeline, timeline.makespan_s)}, bubble {timeline.bubble_fraction():.1%}"
        + (f", {per_second * unit:.3g} columns per {one}" if per_second * unit != 1 else "")
    )
    return "\n".join(lines) + "\n"


def _columns_per_second(timeline: Timeline, width: int, several: dict[str, bool]) -> float:
    shortest = min(
        (s.seconds for m in timeline.meshes for s in timeline.compute(m) if s.seconds > 0), default=1.0
    )
    labels = [label_of(s, several[m]) for m in timeline.meshes for s in timeline.compute(m)]
    widest_label = 2 + max(map(len, labels), default=_MIN_COLUMNS)
    for columns in range(widest_label, 0, -1):
        if timeline.makespan_s / shortest * columns <= width:
            return columns / shortest
    return width / timeline.makespan_s


def _cell(label: str, span: Span, columns: int) -> str:
    if span.with_forward and columns < len(label):
        label = label.replace(phase_of(span), phase_of(span)[1:])
    if columns >= len(label) + 2:
        return f"[{label:<{columns - 2}}]"
    if columns >= len(label):
        return f"{label:<{columns}}"
    letter = span.task.phase.value if isinstance(span.task, Task) else label[:1] or "#"
    return letter * columns

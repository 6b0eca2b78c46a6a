"""A timeline as text: one line per mesh, time from left to right."""

from __future__ import annotations

from mpmd.scheduling.appearance import duration, has_several_stages, label_of, unit_of
from mpmd.scheduling.task import Task
from mpmd.scheduling.timeline import Span, Timeline

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
    if columns >= len(label) + 2:
        return f"[{label:<{columns - 2}}]"
    if columns >= len(label):
        return f"{label:<{columns}}"
    letter = span.task.phase.value if isinstance(span.task, Task) else label[:1] or "#"
    return letter * columns

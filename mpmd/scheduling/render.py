"""A timeline as text: one line per mesh, time from left to right."""

from __future__ import annotations

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
    stages = _stages_per_mesh(timeline)
    per_second = _columns_per_second(timeline, width, stages)
    margin = max(map(len, timeline.meshes))
    lines = [timeline.title] if timeline.title else []
    for mesh in timeline.meshes:
        lane = ["."] * round(timeline.makespan_s * per_second)
        for span in timeline.compute(mesh):
            left, right = (round((t - timeline.begin_s) * per_second) for t in (span.start_s, span.end_s))
            lane[left:right] = _cell(_label(span, len(stages[mesh]) > 1), span, right - left)
        lines.append(f"{mesh:<{margin}} |{''.join(lane)}| idle {timeline.bubble_fraction(mesh):6.1%}")
    lines.append(
        f"{'':<{margin}} {timeline.makespan_s:.6g} s, bubble {timeline.bubble_fraction():.1%}"
        + (f", {per_second:.3g} columns per second" if per_second != 1 else "")
    )
    return "\n".join(lines) + "\n"


def _columns_per_second(timeline: Timeline, width: int, stages: dict[str, set[int]]) -> float:
    shortest = min(
        (s.seconds for m in timeline.meshes for s in timeline.compute(m) if s.seconds > 0), default=1.0
    )
    labels = [_label(s, len(stages[m]) > 1) for m in timeline.meshes for s in timeline.compute(m)]
    widest_label = 2 + max(map(len, labels), default=_MIN_COLUMNS)
    for columns in range(widest_label, 0, -1):
        if timeline.makespan_s / shortest * columns <= width:
            return columns / shortest
    return width / timeline.makespan_s


def _stages_per_mesh(timeline: Timeline) -> dict[str, set[int]]:
    return {
        mesh: {span.task.stage for span in timeline.compute(mesh) if span.task is not None}
        for mesh in timeline.meshes
    }


def _label(span: Span, with_stage: bool) -> str:
    if span.task is None:
        return span.name
    return str(span.task) if with_stage else f"{span.task.phase.value}{span.task.microbatch}"


def _cell(label: str, span: Span, columns: int) -> str:
    if columns >= len(label) + 2:
        return f"[{label:<{columns - 2}}]"
    if columns >= len(label):
        return f"{label:<{columns}}"
    letter = span.task.phase.value if isinstance(span.task, Task) else label[:1] or "#"
    return letter * columns

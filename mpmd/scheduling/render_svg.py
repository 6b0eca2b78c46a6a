"""A timeline as an SVG picture, in which no two texts overlap."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from mpmd.scheduling.render import (
    IDLE_COLOUR,
    INK,
    UPPER_PART,
    bytes_text,
    duration,
    fills_of,
    has_several_stages,
    label_of,
    meaning_of,
    phase_of,
    phases_of,
    unit_of,
)
from mpmd.scheduling.timeline import Span, Timeline

_LEFT, _LANE, _GAP, _AXIS, _LINE, _RIGHT = 8, 26, 6, 30, 18, 84
LETTER = 6.8
"""Pixels of a letter of 11 px, at most on average."""
PAGE_WIDTH, MAX_WIDTH = 736, 8000
"""Pixels: of a column of documentation, which is the default, and at most of a `legible_width`."""


def render_svg(*timelines: Timeline, width: int | None = None) -> str:
    """One lane per mesh, one rectangle per task, a time axis and a legend below; hovering shows the details.

    A task is called `1F3`, stage, phase and microbatch, as far as it has room: `3` where it has little,
    nothing where it has less.

    Args:
        *timelines: the timelines to draw, one below the other on one time scale.
        width: of the picture, in pixels; by default it fits into a page of 736 without being scaled.  With
            `legible_width` tasks have room for whole labels.
    """
    width = PAGE_WIDTH if width is None else width
    longest = max((timeline.makespan_s for timeline in timelines), default=0.0)
    names = [mesh for timeline in timelines for mesh in timeline.meshes]
    margin = _margin(names, width)
    scale = max(0.0, width - margin - _RIGHT) / (longest or 1.0)
    parts: list[str] = []
    top = 4
    for timeline in timelines:
        for line in _wrapped(_heading(timeline), int((width - 2 * _LEFT) / LETTER * 11 / 13)):
            parts.append(f'<text x="{_LEFT}" y="{top + 13}" font-size="13">{escape(line)}</text>')
            top += _LINE
        parts += _lanes(timeline, top + 4, margin, scale)
        top += 4 + len(timeline.meshes) * (_LANE + _GAP)
    if longest:
        parts += _axis(max(timelines, key=lambda t: t.makespan_s), margin, scale, top + 4)
    legend, bottom = _legend(timelines, margin, width - _LEFT, top + _AXIS)
    parts += legend
    height = bottom + 6
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def legible_width(*timelines: Timeline) -> int:
    """Pixels with which whole labels fit into most tasks: the shortest tenth may be too short."""
    needs = sorted(
        (LETTER * len(label_of(span, has_several_stages(timeline, mesh))) + 2) / span.seconds
        for timeline in timelines
        for mesh in timeline.meshes
        for span in timeline.compute(mesh)
        if span.task is not None and span.seconds > 0
    )
    scale = needs[len(needs) * 9 // 10] if needs else 0.0
    longest = max((timeline.makespan_s for timeline in timelines), default=0.0)
    margin = _margin([mesh for timeline in timelines for mesh in timeline.meshes], MAX_WIDTH)
    return round(min(max(PAGE_WIDTH, scale * longest + margin + _RIGHT + 1), MAX_WIDTH))


def _margin(meshes: Iterable[str], width: int) -> int:
    """Pixels for the names of meshes, at most a quarter of the picture."""
    longest = max(map(len, meshes), default=0)
    return min(_LEFT + round(LETTER * longest) + 10, width // 4)


def _heading(timeline: Timeline) -> str:
    summary = f"{duration(timeline, timeline.makespan_s)}, bubble {timeline.bubble_fraction():.1%}"
    return " · ".join(filter(None, (timeline.title, summary)))


def _wrapped(text: str, columns: int) -> list[str]:
    """Lines of a text of at most so many letters, broken at blanks."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > columns:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [_shortened(line, columns) for line in lines]


def _shortened(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: max(0, columns - 1)] + "…"


def _lanes(timeline: Timeline, above: int, margin: int, scale: float) -> Iterator[str]:
    """A lane per mesh, from `above` on."""
    wide = timeline.makespan_s * scale
    for row, mesh in enumerate(timeline.meshes):
        top = above + row * (_LANE + _GAP)
        several = has_several_stages(timeline, mesh)
        name = _shortened(mesh, int((margin - _LEFT - 4) / LETTER))
        yield f'<text x="{_LEFT}" y="{top + 17}">{escape(name)}<title>{escape(mesh)}</title></text>'
        yield (
            f'<rect x="{margin}" y="{top}" width="{_number(wide)}" height="{_LANE}" fill="{IDLE_COLOUR}"/>'
        )
        for span in timeline.compute(mesh):
            left = margin + (span.start_s - timeline.begin_s) * scale
            yield _rectangle(timeline, span, left, top, scale, several)
        yield (
            f'<text x="{_number(margin + wide + 6)}" y="{top + 17}">'
            f"{timeline.bubble_fraction(mesh):.1%} idle</text>"
        )


_FOLDERS = re.compile(r"(?<=\()/(?:[^/()]+/)*(?=[^/()]+/[^/()]+:\d)")
"""Of the path of a source, all but the last: pictures leave the machine on which they are drawn."""


def describe(timeline: Timeline, span: Span) -> str:
    """A span in words, a line for each thing."""
    start, end, took = (duration(timeline, s) for s in (span.start_s, span.end_s, span.seconds))
    lines = [span.name, f"{start} to {end}: {took}"]
    if span.task is not None:
        task = f"stage {span.task.stage}, microbatch {span.task.microbatch}"
        lines.insert(1, f"{task}, {meaning_of(phase_of(span))}")
    if span.nbytes:
        lines.append(bytes_text(span.nbytes))
    if span.source:
        lines.append(_FOLDERS.sub("", span.source))
    if span.note:
        lines.append(span.note)
    return "\n".join(lines)


def labels_of(span: Span, with_stage: bool) -> Sequence[str]:
    """The label of a span and shorter ones; the shortest of a task is its microbatch."""
    whole = label_of(span, with_stage)
    return (whole,) if span.task is None else (whole, str(span.task.microbatch))


def _rectangle(timeline: Timeline, span: Span, x: float, top: int, scale: float, with_stage: bool) -> str:
    wide = span.seconds * scale
    *above, fill = fills_of(phase_of(span))
    edge = 0.7 if wide > 4 else 0
    parts = [
        f'<g><rect x="{_number(x)}" y="{top}" width="{_number(wide)}" height="{_LANE}" '
        f'fill="{fill}" stroke="white" stroke-width="{edge}"/>'
    ]
    for colour in above:
        parts.append(
            f'<rect x="{_number(x + edge / 2)}" y="{top}" width="{_number(wide - edge)}" '
            f'height="{round(UPPER_PART * _LANE)}" fill="{colour}"/>'
        )
    fitting = (label for label in labels_of(span, with_stage) if wide >= LETTER * len(label) + 2)
    if label := next(fitting, ""):
        parts.append(
            f'<text x="{_number(x + wide / 2)}" y="{top + 17}" text-anchor="middle" fill="{INK}">'
            f"{escape(label)}</text>"
        )
    parts.append(f"<title>{escape(describe(timeline, span))}</title></g>")
    return "".join(parts)


def ticks(timeline: Timeline, most: int = 10) -> list[tuple[float, str]]:
    """Seconds and text of about `most` round times of a timeline, the first with the name of the unit."""
    unit, name = unit_of(timeline)
    step = _round_step(timeline.makespan_s / unit / most)
    count = int(timeline.makespan_s / unit / step * (1 + 1e-9)) + 1
    return [(k * step * unit, f"{k * step:.6g}" + (f" {name}" if not k else "")) for k in range(count)]


def _axis(timeline: Timeline, margin: int, scale: float, top: int) -> Iterator[str]:
    room = timeline.makespan_s * scale / (LETTER * 7)
    for seconds, label in ticks(timeline, max(1, min(10, int(room)))):
        x = _number(margin + seconds * scale)
        yield f'<line x1="{x}" x2="{x}" y1="{top - 4}" y2="{top}" stroke="#888"/>'
        yield f'<text x="{x}" y="{top + 12}" text-anchor="middle" fill="#555">{label}</text>'


def _legend(timelines: Sequence[Timeline], left: int, right: int, top: int) -> tuple[list[str], int]:
    """The entries, in as many rows as they need, and where they end."""
    entries = [(fills_of(phase), meaning_of(phase)) for phase in phases_of(*timelines)]
    parts: list[str] = []
    x = float(left)
    for fills, meaning in [*entries, ([IDLE_COLOUR], "idle")] if entries else []:
        wide = 17 + LETTER * len(meaning)
        if x > left and x + wide > right:
            x, top = float(left), top + _LINE
        for fill, high in zip(reversed(fills), (12, 12 * UPPER_PART), strict=False):
            parts.append(
                f'<rect x="{_number(x)}" y="{top}" width="12" height="{_number(high)}" fill="{fill}"/>'
            )
        parts.append(f'<text x="{_number(x + 17)}" y="{top + 10}" fill="#555">{meaning}</text>')
        x += wide + 20
    return parts, top + _LINE


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that is not below ``least``."""
    power = 1e-9
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least * (1 - 1e-9):
                return digit * power
        power *= 10


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")

"""A timeline as an SVG picture."""

from __future__ import annotations

from html import escape

from mpmd.scheduling.render import (
    COLOURS,
    IDLE_COLOUR,
    INK,
    MEANING,
    duration,
    has_several_stages,
    label_of,
    phase_of,
    phases_of,
    unit_of,
)
from mpmd.scheduling.timeline import Span, Timeline

_MARGIN, _LANE, _GAP, _TITLE, _AXIS, _LEGEND, _RIGHT = 90, 26, 6, 26, 30, 24, 80
_LETTER = 6.5
"""Pixels of a letter in a label."""
MIN_WIDTH, MAX_WIDTH = 1200, 8000
"""Pixels of a picture whose width is not given."""


def render_svg(*timelines: Timeline, width: int | None = None) -> str:
    """One lane per mesh, one rectangle per task, a time axis and a legend below; hovering shows the details.

    Args:
        *timelines: the timelines to draw, one below the other on one time scale.
        width: of the picture, in pixels; by default such that labels fit into tasks, from `MIN_WIDTH` to
            `MAX_WIDTH`.
    """
    longest = max((timeline.makespan_s for timeline in timelines), default=0.0)
    width = _legible_width(timelines, longest) if width is None else width
    scale = (width - _MARGIN - _RIGHT) / (longest or 1.0)
    height = sum(map(_height, timelines)) + _AXIS + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    top = 0
    for timeline in timelines:
        parts += _lanes(timeline, top, scale)
        top += _height(timeline)
    if longest:
        parts += _axis(max(timelines, key=lambda t: t.makespan_s), scale, top + 4)
    parts += _legend(timelines, height - _LEGEND + 4)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _legible_width(timelines: tuple[Timeline, ...], longest: float) -> int:
    """Pixels with which most labels fit: the shortest tenth of tasks may be too short."""
    needs = sorted(
        _LETTER * len(label_of(span, has_several_stages(timeline, mesh))) / span.seconds
        for timeline in timelines
        for mesh in timeline.meshes
        for span in timeline.compute(mesh)
        if span.task is not None and span.seconds > 0
    )
    scale = needs[len(needs) * 9 // 10] if needs else 0.0
    return round(min(max(MIN_WIDTH, scale * longest + _MARGIN + _RIGHT + 1), MAX_WIDTH))


def _height(timeline: Timeline) -> int:
    return _TITLE + len(timeline.meshes) * (_LANE + _GAP)


def _lanes(timeline: Timeline, above: int, scale: float) -> list[str]:
    """A heading and a lane per mesh, from `above` on."""
    summary = f"{duration(timeline, timeline.makespan_s)}, bubble {timeline.bubble_fraction():.1%}"
    heading = " · ".join(filter(None, (timeline.title, summary)))
    parts = [f'<text x="8" y="{above + 17}" font-size="13">{escape(heading)}</text>']
    wide = timeline.makespan_s * scale
    for row, mesh in enumerate(timeline.meshes):
        top = above + _TITLE + row * (_LANE + _GAP)
        several = has_several_stages(timeline, mesh)
        parts.append(f'<text x="8" y="{top + 17}">{escape(mesh)}</text>')
        parts.append(
            f'<rect x="{_MARGIN}" y="{top}" width="{_number(wide)}" height="{_LANE}" fill="{IDLE_COLOUR}"/>'
        )
        for span in timeline.compute(mesh):
            left = _MARGIN + (span.start_s - timeline.begin_s) * scale
            parts.append(_rectangle(timeline, span, left, top, scale, several))
        parts.append(
            f'<text x="{_number(_MARGIN + wide + 6)}" y="{top + 17}">'
            f"{timeline.bubble_fraction(mesh):.1%} idle</text>"
        )
    return parts


def describe(timeline: Timeline, span: Span) -> str:
    start, end, took = (duration(timeline, s) for s in (span.start_s, span.end_s, span.seconds))
    lines = [span.name, f"{start} to {end}: {took}"]
    if span.task is not None:
        lines.insert(
            1, f"stage {span.task.stage}, microbatch {span.task.microbatch}, {MEANING[phase_of(span)]}"
        )
    if span.nbytes:
        lines.append(f"{span.nbytes:,} bytes")
    if span.note:
        lines.append(span.note)
    return "\n".join(lines)


def _rectangle(timeline: Timeline, span: Span, x: float, top: int, scale: float, with_stage: bool) -> str:
    wide = span.seconds * scale
    label = label_of(span, with_stage)
    parts = [
        f'<g><rect x="{_number(x)}" y="{top}" width="{_number(wide)}" height="{_LANE}" '
        f'fill="{COLOURS[phase_of(span)]}" stroke="white" stroke-width="{0.7 if wide > 4 else 0}"/>'
    ]
    if wide >= _LETTER * len(label):
        parts.append(
            f'<text x="{_number(x + wide / 2)}" y="{top + 17}" text-anchor="middle" fill="{INK}">'
            f"{escape(label)}</text>"
        )
    parts.append(f"<title>{escape(describe(timeline, span))}</title></g>")
    return "".join(parts)


def ticks(timeline: Timeline) -> list[tuple[float, str]]:
    """Seconds and text of about ten round times of a timeline, the first with the name of the unit."""
    unit, name = unit_of(timeline)
    step = _round_step(timeline.makespan_s / unit / 10)
    count = int(timeline.makespan_s / unit / step * (1 + 1e-9)) + 1
    return [(k * step * unit, f"{k * step:.6g}" + (f" {name}" if not k else "")) for k in range(count)]


def _axis(timeline: Timeline, scale: float, top: int) -> list[str]:
    parts = []
    for seconds, label in ticks(timeline):
        x = _number(_MARGIN + seconds * scale)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{top - 4}" y2="{top}" stroke="#888"/>')
        parts.append(f'<text x="{x}" y="{top + 12}" text-anchor="middle" fill="#555">{label}</text>')
    return parts


def _legend(timelines: tuple[Timeline, ...], top: int) -> list[str]:
    parts, x = [], float(_MARGIN)
    entries = [(COLOURS[phase], MEANING[phase]) for phase in phases_of(*timelines)]
    for colour, meaning in [*entries, (IDLE_COLOUR, "idle")] if entries else []:
        parts.append(f'<rect x="{_number(x)}" y="{top}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{_number(x + 17)}" y="{top + 10}" fill="#555">{meaning}</text>')
        x += 17 + _LETTER * len(meaning) + 22
    return parts


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

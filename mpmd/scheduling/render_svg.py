"""A timeline as an SVG picture."""

from __future__ import annotations

from html import escape

from mpmd.scheduling.timeline import Span, Timeline

COLOURS = {"F": "#4e8fd0", "B": "#5aa469", "I": "#79b791", "W": "#d9a441", "": "#9a9a9a"}
"""Fill per phase; the empty phase is for spans without a task."""

_MARGIN, _LANE, _GAP, _TITLE, _AXIS = 90, 26, 6, 26, 30


def render_svg(*timelines: Timeline, width: int = 1200) -> str:
    """One lane per mesh, one rectangle per task, a time axis below; hovering shows the details.

    Args:
        *timelines: the timelines to draw, one below the other on one time scale.
        width: of the picture, in pixels.
    """
    longest = max((timeline.makespan_s for timeline in timelines), default=0.0)
    scale = (width - _MARGIN - 80) / (longest or 1.0)
    height = sum(map(_height, timelines)) + _AXIS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    top = 0
    for timeline in timelines:
        parts += _lanes(timeline, top, scale)
        top += _height(timeline)
    parts += _axis(longest, scale, height - _AXIS + 4)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _height(timeline: Timeline) -> int:
    return _TITLE + len(timeline.meshes) * (_LANE + _GAP)


def _lanes(timeline: Timeline, above: int, scale: float) -> list[str]:
    """A heading and a lane per mesh, from `above` on."""
    summary = f"{timeline.makespan_s:.6g} s, bubble {timeline.bubble_fraction():.1%}"
    heading = " · ".join(filter(None, (timeline.title, summary)))
    parts = [f'<text x="8" y="{above + 17}" font-size="13">{escape(heading)}</text>']
    wide = timeline.makespan_s * scale
    for row, mesh in enumerate(timeline.meshes):
        top = above + _TITLE + row * (_LANE + _GAP)
        spans = timeline.compute(mesh)
        several = len({span.task.stage for span in spans if span.task is not None}) > 1
        parts.append(f'<text x="8" y="{top + 17}">{escape(mesh)}</text>')
        parts.append(
            f'<rect x="{_MARGIN}" y="{top}" width="{_number(wide)}" height="{_LANE}" fill="#f1f1f1"/>'
        )
        for span in spans:
            left = _MARGIN + (span.start_s - timeline.begin_s) * scale
            parts.append(_rectangle(span, left, top, scale, several))
        parts.append(
            f'<text x="{_number(_MARGIN + wide + 6)}" y="{top + 17}">'
            f"{timeline.bubble_fraction(mesh):.1%} idle</text>"
        )
    return parts


def describe(span: Span) -> str:
    """The text on hovering over a span."""
    lines = [span.name, f"{span.start_s:.6g} s to {span.end_s:.6g} s: {span.seconds * 1e3:.6g} ms"]
    if span.task is not None:
        lines.insert(
            1, f"stage {span.task.stage}, microbatch {span.task.microbatch}, phase {span.task.phase.value}"
        )
    if span.nbytes:
        lines.append(f"{span.nbytes:,} bytes")
    if span.note:
        lines.append(span.note)
    return "\n".join(lines)


def _rectangle(span: Span, x: float, top: int, scale: float, with_stage: bool) -> str:
    phase = span.task.phase.value if span.task is not None else ""
    wide = span.seconds * scale
    label = span.name
    if span.task is not None and not with_stage:
        label = f"{phase}{span.task.microbatch}"
    parts = [
        f'<g><rect x="{_number(x)}" y="{top}" width="{_number(wide)}" height="{_LANE}" '
        f'fill="{COLOURS[phase]}" stroke="white" stroke-width="{0.7 if wide > 4 else 0}"/>'
    ]
    if wide >= 6.5 * len(label):
        parts.append(
            f'<text x="{_number(x + wide / 2)}" y="{top + 17}" text-anchor="middle">{escape(label)}</text>'
        )
    parts.append(f"<title>{escape(describe(span))}</title></g>")
    return "".join(parts)


def _axis(makespan_s: float, scale: float, top: int) -> list[str]:
    """Ticks at round numbers, about ten of them."""
    if not makespan_s:
        return []
    unit, name = next(
        (u, n) for u, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "us")) if makespan_s >= u
    )
    unit = unit or 1e-6
    step = _round_step(makespan_s / unit / 10)
    ticks = []
    k = 0
    while k * step * unit <= makespan_s * (1 + 1e-9):
        x = _MARGIN + k * step * unit * scale
        label = f"{k * step:.6g}" + (f" {name}" if k == 0 else "")
        ticks.append(f'<line x1="{_number(x)}" x2="{_number(x)}" y1="{top - 4}" y2="{top}" stroke="#888"/>')
        ticks.append(f'<text x="{_number(x)}" y="{top + 12}" text-anchor="middle" fill="#555">{label}</text>')
        k += 1
    return ticks


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

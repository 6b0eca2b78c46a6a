"""A timeline as an SVG picture."""

from __future__ import annotations

from html import escape

from mpmd.scheduling.timeline import Span, Timeline

COLOURS = {"F": "#4e8fd0", "B": "#5aa469", "I": "#79b791", "W": "#d9a441", "": "#9a9a9a"}
"""Fill per phase; the empty phase is for spans that are no task."""

_MARGIN, _LANE, _GAP, _TITLE, _AXIS = 90, 26, 6, 26, 30


def render_svg(timeline: Timeline, width: int = 1200) -> str:
    """One lane per mesh, one rectangle per task, a time axis below; hovering shows the details.

    Args:
        timeline: what to draw.
        width: of the picture, in pixels.
    """
    scale = (width - _MARGIN - 80) / (timeline.makespan_s or 1.0)
    height = _TITLE + len(timeline.meshes) * (_LANE + _GAP) + _AXIS
    stages = {
        mesh: {s.task.stage for s in timeline.compute(mesh) if s.task is not None} for mesh in timeline.meshes
    }
    summary = f"{timeline.makespan_s:.6g} s, bubble {timeline.bubble_fraction():.1%}"
    heading = " · ".join(filter(None, (timeline.title, summary)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="17" font-size="13">{escape(heading)}</text>',
    ]
    for row, mesh in enumerate(timeline.meshes):
        top = _TITLE + row * (_LANE + _GAP)
        parts.append(f'<text x="8" y="{top + 17}">{escape(mesh)}</text>')
        lane_width = _number(timeline.makespan_s * scale)
        parts.append(f'<rect x="{_MARGIN}" y="{top}" width="{lane_width}" height="{_LANE}" fill="#f1f1f1"/>')
        for span in timeline.compute(mesh):
            parts.append(
                _rectangle(
                    span,
                    _MARGIN + (span.start_s - timeline.begin_s) * scale,
                    top,
                    scale,
                    len(stages[mesh]) > 1,
                )
            )
        parts.append(
            f'<text x="{_number(_MARGIN + timeline.makespan_s * scale + 6)}" y="{top + 17}">'
            f"{timeline.bubble_fraction(mesh):.1%} idle</text>"
        )
    parts += _axis(timeline.makespan_s, scale, height - _AXIS + 4)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def describe(span: Span) -> str:
    """What hovering over a span shows."""
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

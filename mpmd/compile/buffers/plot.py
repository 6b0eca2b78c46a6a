"""An arena as a picture: time to the right, addresses upwards, a box for each value, a line for their sum."""

from __future__ import annotations

from html import escape
from itertools import pairwise

from mpmd.compile.buffers.assignment import BufferAssignment
from mpmd.compile.buffers.report import Holding, bytes_in_use, holdings

_WIDTH, _HEIGHT, _MARGIN = 960, 480, 40
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


def memory_plot(assignment: BufferAssignment) -> str:
    """An SVG of the default memory's arena; hovering over a box names its value."""
    arena = assignment.arenas[0]
    held = holdings(assignment, arena)
    length = assignment.occupancy.liveness.time.length + 1
    in_use = bytes_in_use(held)
    most = max(in_use.values())
    at = next(instant for instant, size in in_use.items() if size == most)
    right, up = (_WIDTH - 2 * _MARGIN) / length, (_HEIGHT - 2 * _MARGIN) / max(1, arena.size)
    floor = _HEIGHT - _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="20">{arena.size:,} bytes; most in use: {most:,} at instant {at} '
        f"of {length - 1}</text>",
    ]
    for number, holding in enumerate(held):
        lines += _boxes(holding, _COLOURS[number % len(_COLOURS)], right, up, floor)
    points = []
    for instant, until in pairwise([*in_use, length]):
        y = floor - in_use[instant] * up
        points += [f"{_MARGIN + instant * right:.1f},{y:.1f}", f"{_MARGIN + until * right:.1f},{y:.1f}"]
    lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="black" stroke-width="1.5"/>')
    lines.append(f'<line x1="{_MARGIN}" y1="{floor}" x2="{_WIDTH - _MARGIN}" y2="{floor}" stroke="#888"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _boxes(holding: Holding, colour: str, right: float, up: float, floor: float) -> list[str]:
    """The boxes of one value: one for each of its spans."""
    place = holding.place
    title = escape(f"{holding.label} {holding.shape}: {place.size:,} bytes at {place.offset:,}")
    return [
        f'<rect x="{_MARGIN + s.start * right:.1f}" y="{floor - (place.offset + place.size) * up:.1f}" '
        f'width="{(s.end - s.start + 1) * right:.1f}" height="{place.size * up:.1f}" fill="{colour}" '
        f'fill-opacity="0.6" stroke="white" stroke-width="0.5"><title>{title}</title></rect>'
        for s in holding.spans
    ]

"""Reports of an assignment: a text in the manner of XLA's `buffer-assignment.txt`, and a picture of an arena.

The text ends with the values that are live at the peak.  In the picture time goes to the right and addresses
upwards; each value is a box, and a line is their sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise

from mpmd.compile.analysis.liveness import LiveRange, merged
from mpmd.compile.buffers.assignment import Allocation, BufferAssignment, Slice

_MAX_HOLDERS = 20


@dataclass(frozen=True)
class Holding:
    """A value or scratch memory in an allocation.

    Attributes:
        label: the value, or the instruction that needs the scratch memory.
        place: where.
        spans: when.
        shape: of the value; empty for scratch.
    """

    label: str
    place: Slice
    spans: tuple[LiveRange, ...]
    shape: str = ""

    def alive(self, instant: int) -> bool:
        """Whether it is in use at an instant."""
        return any(s.start <= instant <= s.end for s in self.spans)


def holdings(assignment: BufferAssignment, allocation: Allocation) -> list[Holding]:
    """The contents of an allocation, by offset and then by time."""
    occupancy = assignment.occupancy
    held = [
        Holding(str(value), place, occupancy.spans[value], str(value.shape))
        for value, place in assignment.slices.items()
        if place.allocation == allocation.number
    ]
    for instruction, place in assignment.scratch.items():
        if place.allocation == allocation.number:
            instant = occupancy.instants[instruction]
            held.append(Holding(f"scratch of {instruction.name}", place, (LiveRange(instant, instant),)))
    return sorted(held, key=lambda h: (h.place.offset, h.spans[0].start, h.label))


def bytes_in_use(held: list[Holding]) -> dict[int, int]:
    """Bytes of an allocation that are in use from an instant on, for every instant at which that changes.

    Values that share memory count once.
    """
    spans: dict[tuple[int, int], list[LiveRange]] = {}
    for h in held:
        spans.setdefault((h.place.offset, h.place.size), []).extend(h.spans)
    changes: dict[int, int] = {0: 0}
    for (_, size), ranges in spans.items():
        for span in merged(ranges):
            changes[span.start] = changes.get(span.start, 0) + size
            changes[span.end + 1] = changes.get(span.end + 1, 0) - size
    total, in_use = 0, {}
    for instant in sorted(changes):
        total += changes[instant]
        in_use[instant] = total
    return in_use


def assignment_report(assignment: BufferAssignment) -> str:
    """Allocations with their values, statistics, and the values live at the peak."""
    lines = ["BufferAssignment:"]
    for allocation in assignment.allocations:
        lines.append(str(allocation))
        for h in holdings(assignment, allocation):
            spans = " ".join(f"{s.start}-{s.end}" for s in h.spans)
            shape = f" {h.shape}" if h.shape else ""
            lines.append(f" {h.label} [{h.place.offset}, {h.place.size} bytes]{shape} alive {spans}")
    lines += ["", "Statistics:"]
    for kind in ("parameter", "result", "constant", "arena"):
        sizes = [a.size for a in assignment.allocations if a.kind == kind]
        lines.append(f" {kind}: {len(sizes)} allocations, {sum(sizes)} bytes")
    for arena in assignment.arenas:
        packing = assignment.packings[arena.space]
        waste = packing.size - packing.lower_bound
        space = f" of memory space {arena.space}" if arena.space else ""
        lines.append(f" arena{space}: {packing.size} bytes, {waste} above the maximum live at once")
    if assignment.reused:
        lines.append(f" reused from results: {assignment.reused} bytes")
    for arena in assignment.arenas:
        lines += ["", *_peak(assignment, arena)]
    return "\n".join(lines) + "\n"


def peak_holders(assignment: BufferAssignment) -> list[tuple[str, int]]:
    """The values in the default memory's arena at its peak, with their bytes, largest first."""
    return [(h.label, h.place.size) for h in _at_peak(assignment, assignment.arenas[0])[2]]


def _at_peak(assignment: BufferAssignment, arena: Allocation) -> tuple[int, int, list[Holding]]:
    """(the peak in bytes, its first instant, the values live then)."""
    held = holdings(assignment, arena)
    in_use = bytes_in_use(held)
    most = max(in_use.values())
    at = next(instant for instant, size in in_use.items() if size == most)
    alive = [h for h in held if h.alive(at)]
    return most, at, sorted(alive, key=lambda h: (-h.place.size, h.label))


def _peak(assignment: BufferAssignment, arena: Allocation) -> list[str]:
    most, at, alive = _at_peak(assignment, arena)
    space = f" of memory space {arena.space}" if arena.space else ""
    lines = [f"Peak{space}: {most} bytes at instant {at}{_running(assignment, at)}"]
    lines += [
        f" {h.place.size:>12} {100 * h.place.size / max(1, most):5.1f} % {h.label}"
        for h in alive[:_MAX_HOLDERS]
    ]
    if len(alive) > _MAX_HOLDERS:
        rest = sum(h.place.size for h in alive[_MAX_HOLDERS:])
        lines.append(f" {rest:>12} in {len(alive) - _MAX_HOLDERS} others")
    return lines


def _running(assignment: BufferAssignment, instant: int) -> str:
    running = [i for i, at in assignment.occupancy.instants.items() if at == instant]
    return f", {running[0].opcode} {running[0].name}" if running else ""


_WIDTH, _HEIGHT, _MARGIN, _LEFT = 960, 480, 40, 90
_LETTER, _LINE = 6.2, 12
"""Pixels of a letter, and of a line of text, in a box."""
_COLOURS = ("#56b4e9", "#e69f00", "#2fb389", "#c9a0c0", "#f0c860", "#7fb2d6", "#e08a5a", "#b0b7c3")
"""Lightened colours of Okabe and Ito: text is written on them."""


_NO_TEMPORARIES = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} 30" font-family="sans-serif" font-size="11">
<rect width="{_WIDTH}" height="30" fill="white"/>
<text x="{_LEFT}" y="19">no temporaries: its values are arguments, results and constants</text>
</svg>
"""


def memory_plot(assignment: BufferAssignment) -> str:
    """An SVG of the default memory's arena: bytes over instants, the order of instructions.

    A box has the name of its value if it is large enough; hovering shows the name, the shape and the place.
    Without values in the arena it is one line that says so.
    """
    arena = assignment.arenas[0]
    held = holdings(assignment, arena)
    if not held:
        return _NO_TEMPORARIES
    length = assignment.occupancy.liveness.time.length + 1
    in_use = bytes_in_use(held)
    most = max(in_use.values())
    at = next(instant for instant, size in in_use.items() if size == most)
    right, up = (_WIDTH - _LEFT - _MARGIN) / length, (_HEIGHT - 2 * _MARGIN) / max(1, arena.size)
    floor = _HEIGHT - _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{arena.size:,} bytes; most in use: {most:,} at instant {at} '
        f"of {length - 1}</text>",
    ]
    for number, holding in enumerate(held):
        lines += _boxes(holding, _COLOURS[number % len(_COLOURS)], right, up, floor)
    points = []
    for instant, until in pairwise([*in_use, length]):
        y = floor - in_use[instant] * up
        points += [f"{_LEFT + instant * right:.1f},{y:.1f}", f"{_LEFT + until * right:.1f},{y:.1f}"]
    lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="black" stroke-width="1.5"/>')
    lines += [*_bytes_axis(arena.size, up, floor), *_instants_axis(length - 1, right, floor)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _boxes(holding: Holding, colour: str, right: float, up: float, floor: float) -> list[str]:
    """The boxes of one value: one for each of its spans."""
    place = holding.place
    title = escape(f"{holding.label} {holding.shape}: {place.size:,} bytes at {place.offset:,}")
    lines, high = [], place.size * up
    for span in holding.spans:
        x, wide = _LEFT + span.start * right, (span.end - span.start + 1) * right
        y = floor - (place.offset + place.size) * up
        lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{colour}" '
            f'fill-opacity="0.8" stroke="white" stroke-width="0.5"><title>{title}</title></rect>'
        )
        if high >= _LINE and wide >= _LETTER * len(holding.label):
            lines.append(
                f'<text x="{x + 3:.1f}" y="{y + high / 2 + 4:.1f}" pointer-events="none">'
                f"{escape(holding.label)}</text>"
            )
    return lines


def _bytes_axis(size: int, up: float, floor: int) -> list[str]:
    lines = [f'<line x1="{_LEFT}" y1="{_MARGIN}" x2="{_LEFT}" y2="{floor}" stroke="#888"/>']
    for value in _round_values(size, 6):
        y = floor - value * up
        lines.append(f'<line x1="{_LEFT - 4}" y1="{y:.1f}" x2="{_LEFT}" y2="{y:.1f}" stroke="#888"/>')
        lines.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{value:,}</text>')
    middle = (_MARGIN + floor) // 2
    turned = f'transform="rotate(-90 12 {middle})" text-anchor="middle"'
    return [*lines, f'<text x="12" y="{middle}" {turned}>address, bytes</text>']


def _instants_axis(last: int, right: float, floor: int) -> list[str]:
    lines = [f'<line x1="{_LEFT}" y1="{floor}" x2="{_WIDTH - _MARGIN}" y2="{floor}" stroke="#888"/>']
    for value in _round_values(last, 12):
        x = _LEFT + value * right
        lines.append(f'<line x1="{x:.1f}" y1="{floor}" x2="{x:.1f}" y2="{floor + 4}" stroke="#888"/>')
        lines.append(f'<text x="{x:.1f}" y="{floor + 15}" text-anchor="middle">{value:,}</text>')
    middle = (_LEFT + _WIDTH - _MARGIN) // 2
    label = "instant: position of the instruction that runs; the black line is the sum of bytes in use"
    return [*lines, f'<text x="{middle}" y="{floor + 32}" text-anchor="middle">{label}</text>']


def _round_values(last: int, count: int) -> range:
    """At most about `count` multiples of 1, 2 or 5 times a power of ten, from 0 on."""
    power = 1
    while True:
        for step in (power, 2 * power, 5 * power):
            if step * count >= last:
                return range(0, last + 1, step)
        power *= 10

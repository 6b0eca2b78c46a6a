"""An assignment as text, in the manner of XLA's `buffer-assignment.txt`."""

from __future__ import annotations

from mpmd.compile.buffers.assignment import BufferAssignment


def assignment_report(assignment: BufferAssignment) -> str:
    """Allocations with their values, statistics, and who holds the peak."""
    lines = ["BufferAssignment:"]
    for allocation in assignment.allocations:
        lines.append(str(allocation))
        held = [
            (place.offset, value)
            for value, place in assignment.slices.items()
            if place.allocation == allocation.number
        ]
        for offset, value in sorted(held, key=lambda p: (p[0], p[1].number)):
            spans = " ".join(f"{s.start}-{s.end}" for s in assignment.occupancy.spans[value])
            lines.append(f" {value} [{offset}, {value.byte_size} bytes] {value.shape} alive {spans}")
    lines += ["", "Statistics:"]
    for kind in ("parameter", "result", "constant", "arena"):
        sizes = [a.size for a in assignment.allocations if a.kind == kind]
        lines.append(f" {kind}: {len(sizes)} allocations, {sum(sizes)} bytes")
    packing = assignment.packing
    waste = packing.size - packing.lower_bound
    lines.append(f" arena: {packing.size} bytes, {waste} above the most that is alive at once")
    lines += ["", *_peak(assignment)]
    return "\n".join(lines) + "\n"


def _peak(assignment: BufferAssignment) -> list[str]:
    """The values in the arena at the instant at which most of it is in use."""
    occupancy, arena = assignment.occupancy, assignment.allocations[-1].number
    values = [v for v, place in assignment.slices.items() if place.allocation == arena]
    instants = sorted({occupancy.first(v) for v in values})
    best: tuple[int, int] = (0, 0)
    for instant in instants:
        places = {
            (assignment.slices[v].offset, v.byte_size) for v in values if _alive(assignment, v, instant)
        }
        best = max(best, (sum(size for _, size in places), -instant))
    instant = -best[1]
    alive = [v for v in values if _alive(assignment, v, instant)]
    alive.sort(key=lambda v: (-v.byte_size, v.number))
    return [f"Peak: {best[0]} bytes at instant {instant}"] + [f" {v.byte_size:>12} {v}" for v in alive[:20]]


def _alive(assignment: BufferAssignment, value: object, instant: int) -> bool:
    spans = assignment.occupancy.spans[value]  # type: ignore[index]
    return any(s.start <= instant <= s.end for s in spans)

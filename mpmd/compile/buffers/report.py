"""An assignment as text, in the manner of XLA's `buffer-assignment.txt`, with the values live at its peak."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.analysis.liveness import LiveRange
from mpmd.compile.buffers.assignment import Allocation, BufferAssignment, Slice
from mpmd.compile.buffers.ranges import merged

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
    found = [
        Holding(str(value), place, occupancy.spans[value], str(value.shape))
        for value, place in assignment.slices.items()
        if place.allocation == allocation.number
    ]
    for instruction, place in assignment.scratch.items():
        if place.allocation == allocation.number:
            instant = occupancy.instants[instruction]
            found.append(Holding(f"scratch of {instruction.name}", place, (LiveRange(instant, instant),)))
    return sorted(found, key=lambda h: (h.place.offset, h.spans[0].start, h.label))


def bytes_in_use(held: list[Holding]) -> dict[int, int]:
    """Bytes of an allocation that are in use from an instant on, for every instant at which that changes.

    Values that share memory count once.
    """
    spans: dict[tuple[int, int], list[LiveRange]] = {}
    for h in held:
        spans.setdefault((h.place.offset, h.place.size), []).extend(h.spans)
    changes: dict[int, int] = {0: 0}
    for (_, size), found in spans.items():
        for span in merged(found):
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
    found = [i for i, at in assignment.occupancy.instants.items() if at == instant]
    return f", {found[0].opcode} {found[0].name}" if found else ""

"""Poison: a debug mode in which memory that no value is in any more is overwritten at once.

A read of a value after its end, or of bytes that were never written, then gives NaN (or -1) instead of the
right number by chance.
"""

from __future__ import annotations

from mpmd.compile.buffers.assignment import BufferAssignment, Slice
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.index import dim
from mpmd.compile.thunks.thunk import KernelThunk, Thunk

POISON = 0xFF
"""In every byte: NaN in all floating-point types, -1 in integers."""

_NAME = "poison"


def is_poison(thunk: Thunk) -> bool:
    """Whether a thunk only overwrites what is free."""
    return isinstance(thunk, KernelThunk) and thunk.plan.name == _NAME


class Poison:
    """Thunks that overwrite what is free.

    Args:
        assignment: where values lie, and when.
    """

    def __init__(self, assignment: BufferAssignment) -> None:
        self.instants = assignment.occupancy.instants
        self._ends: dict[int, list[Slice]] = {}
        """Instant → what is free after it."""
        self._uses: dict[int, list[tuple[int, int, Slice]]] = {}
        """Allocation → (first instant, last instant, part of it that is in use)."""
        # parameters and constants that are read only, and what lies there, stay
        for allocation in assignment.allocations:
            if allocation.kind in ("arena", "result"):
                self._uses[allocation.number] = []
        for value, place in assignment.slices.items():
            if place.size and place.allocation in self._uses:
                for span in assignment.occupancy.spans[value]:
                    self._ends.setdefault(span.end, []).append(place)
                    self._uses[place.allocation].append((span.start, span.end, place))

    def after(self, instruction: HloInstruction, since: int) -> list[KernelThunk]:
        """What is free when an instruction has run and was in use after an instant before it.

        Args:
            instruction: what has just run.
            since: the instant of what was poisoned after last.
        """
        now = self.instants[instruction]
        ended = dict.fromkeys(place for t in range(since + 1, now + 1) for place in self._ends.get(t, ()))
        alive = {
            number: [place for start, end, place in self._uses[number] if start <= now < end]
            for number in {place.allocation for place in ended}
        }
        pieces = [piece for place in ended for piece in _without(place, alive[place.allocation])]
        return [_fill(f"poison.{instruction.name}.{k}", piece) for k, piece in enumerate(pieces)]


def _without(place: Slice, taken: list[Slice]) -> list[Slice]:
    """The parts of a slice that lie in none of others in its allocation."""
    parts = [(place.offset, place.offset + place.size)]
    for other in taken:
        low, high = other.offset, other.offset + other.size
        remaining = [((a, min(b, low)), (max(a, high), b)) for a, b in parts]
        parts = [part for pair in remaining for part in pair if part[0] < part[1]]
    return [Slice(place.allocation, a, b - a) for a, b in parts]


def _fill(name: str, place: Slice) -> KernelThunk:
    """A kernel that writes poison."""
    build = PlanBuilder(_NAME, (place.size,))
    build.store(build.operand("target", "u8", place.size), dim(0), build.constant(POISON, "u8"))
    return KernelThunk(name, build.finish(), (place,))

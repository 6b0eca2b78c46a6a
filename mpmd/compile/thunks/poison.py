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
        self.assignment = assignment
        self.instants = assignment.occupancy.instants
        # parameters and constants that are read only, and what lies there, stay
        self._open = {a.number for a in assignment.allocations if a.kind in ("arena", "result")}
        self._values = [v for v, place in assignment.slices.items() if place.size]
        self._spans = assignment.occupancy.spans

    def after(self, instruction: HloInstruction, since: int) -> list[KernelThunk]:
        """What is free when an instruction has run and was in use after an instant before it.

        Args:
            instruction: what has just run.
            since: the instant of what was poisoned after last.
        """
        now = self.instants[instruction]
        ended = {
            self.assignment.slices[v]: None
            for v in self._values
            if any(since < s.end <= now or s.start == s.end == now for s in self._spans[v])
            and self.assignment.slices[v].allocation in self._open
        }
        alive = [
            self.assignment.slices[v]
            for v in self._values
            if any(s.start <= now < s.end for s in self._spans[v])
        ]
        pieces = [piece for place in ended for piece in _without(place, alive)]
        return [_fill(f"poison.{instruction.name}.{k}", piece) for k, piece in enumerate(pieces)]


def _without(place: Slice, taken: list[Slice]) -> list[Slice]:
    """The parts of a slice that lie in none of others."""
    parts = [(place.offset, place.offset + place.size)]
    for other in taken:
        if other.allocation == place.allocation:
            low, high = other.offset, other.offset + other.size
            cut = [((a, min(b, low)), (max(a, high), b)) for a, b in parts]
            parts = [part for pair in cut for part in pair if part[0] < part[1]]
    return [Slice(place.allocation, a, b - a) for a, b in parts]


def _fill(name: str, place: Slice) -> KernelThunk:
    """A kernel that writes poison."""
    build = PlanBuilder(_NAME, (place.size,))
    build.store(build.operand("target", "u8", place.size), dim(0), build.constant(POISON, "u8"))
    return KernelThunk(name, build.finish(), (place,))

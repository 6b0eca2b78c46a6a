"""Poison: native code that overwrites memory as soon as its last value is dead.

A read of a value after its end, or of bytes that were never written, then gives NaN (or -1) instead of
a number that happens to be right.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from mpmd.compile import driver
from mpmd.compile.buffers.assignment import BufferAssignment, Slice
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.index import dim
from mpmd.compile.thunks.emission import Emitter, KernelPlans
from mpmd.compile.thunks.thunk import KernelThunk, Thunk

POISON = 0xFF
"""In every byte: NaN in all floating-point types, -1 in integers."""

_NAME = "poison"


def is_poison(thunk: Thunk) -> bool:
    """Whether a thunk only overwrites free memory."""
    return isinstance(thunk, KernelThunk) and thunk.plan.name == _NAME


def poison(on: bool) -> AbstractContextManager[Any]:
    """Compile meanwhile with poison, or as users do."""
    return mock.patch.object(driver, "Emitter", PoisoningEmitter if on else Emitter)


class PoisoningEmitter(Emitter):
    """An emitter whose programs overwrite free memory."""

    def __init__(self, assignment: BufferAssignment, plans: KernelPlans) -> None:
        super().__init__(assignment, plans)
        self._poison = Poison(assignment)
        self._since: dict[HloComputation, int] = {}

    def thunks_of(self, instruction: HloInstruction) -> list[Thunk]:
        """With those that overwrite what is free afterwards."""
        thunks, occupancy = super().thunks_of(instruction), self.assignment.occupancy
        start = occupancy.liveness.time.spans[instruction.parent].start
        since = self._since.get(instruction.parent, start - 1)
        self._since[instruction.parent] = occupancy.instants[instruction]
        return [*thunks, *self._poison.after(instruction, since)]


class Poison:
    """Thunks that overwrite free memory.

    Args:
        assignment: slices and live ranges of values.
    """

    def __init__(self, assignment: BufferAssignment) -> None:
        self.instants = assignment.occupancy.instants
        self._ends: dict[int, list[Slice]] = {}
        """Instant → slices that are free after it."""
        self._uses: dict[int, list[tuple[int, int, Slice]]] = {}
        """Allocation → (first instant, last instant, part of it that is in use)."""
        # read-only parameters and constants stay, and values that share their memory
        for allocation in assignment.allocations:
            if allocation.kind in ("arena", "result"):
                self._uses[allocation.number] = []
        for value, place in assignment.slices.items():
            if place.size and place.allocation in self._uses:
                for span in assignment.occupancy.spans[value]:
                    self._ends.setdefault(span.end, []).append(place)
                    self._uses[place.allocation].append((span.start, span.end, place))

    def after(self, instruction: HloInstruction, since: int) -> list[KernelThunk]:
        """Slices that are free after an instruction and were in use after an instant before it.

        Args:
            instruction: the instruction that has just run.
            since: the instant of the last poisoning.
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
    """The parts of a slice that overlap with none of others in its allocation."""
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

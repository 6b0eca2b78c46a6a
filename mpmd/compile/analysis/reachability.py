"""Which instructions of a computation depend on which others, directly or not."""

from __future__ import annotations

from collections.abc import Iterable

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction


class Reachability:
    """Ancestors of every instruction, as one bitset (a Python int) each.

    5,000 instructions take 3 MB and a few milliseconds.  A change of the computation makes it stale: call
    `update`, or build it anew.
    """

    def __init__(self, computation: HloComputation) -> None:
        self._bit: dict[HloInstruction, int] = {}
        self._ancestors: dict[HloInstruction, int] = {}
        for instruction in computation.post_order():
            self._bit[instruction] = len(self._bit)
            self._compute(instruction)

    def _compute(self, instruction: HloInstruction) -> bool:
        """Set the ancestors from the operands' ones; True if they changed."""
        found = 1 << self._bit[instruction]
        ancestors = self._ancestors
        for before in instruction.operands:
            found |= ancestors[before]
        for before in instruction.control_predecessors:
            found |= ancestors[before]
        if ancestors.get(instruction) == found:
            return False
        ancestors[instruction] = found
        return True

    def reaches(self, before: HloInstruction, after: HloInstruction) -> bool:
        """True if `after` depends on `before`, or is it."""
        return bool(self._ancestors[after] >> self._bit[before] & 1)

    def connected(self, a: HloInstruction, b: HloInstruction) -> bool:
        """True if one depends on the other."""
        return self.reaches(a, b) or self.reaches(b, a)

    def __contains__(self, instruction: object) -> bool:
        return instruction in self._bit

    def update(self, changed: Iterable[HloInstruction]) -> None:
        """Follow a change: these instructions have other operands or control edges, or are added."""
        waiting = list(changed)
        for instruction in waiting:
            self._bit.setdefault(instruction, len(self._bit))
        while waiting:
            instruction = waiting.pop(0)
            missing = [
                o
                for o in (*instruction.operands, *instruction.control_predecessors)
                if o not in self._ancestors
            ]
            if missing:
                waiting = [*missing, instruction, *waiting]
                for before in missing:
                    self._bit.setdefault(before, len(self._bit))
            elif self._compute(instruction):
                waiting += [*instruction.users, *instruction.control_successors]

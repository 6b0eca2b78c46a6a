"""Which computations call which, and which instructions reach which."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule

_SEQUENTIAL = frozenset({"call", "while", "conditional"})


class Context(Enum):
    """How a computation is called."""

    SEQUENTIAL = "sequential"
    """By call, while or conditional: its instructions run as part of the program."""
    EMBEDDED = "embedded"
    """By fusion, reduce, sort, map and the like: its values live inside one operation."""
    BOTH = "both"
    """By both kinds."""
    UNREACHED = "unreached"
    """The entry does not reach it."""


class CallGraph:
    """Contexts and nesting of all computations of a module.

    Attributes:
        contexts: how each computation is called.
    """

    def __init__(self, module: HloModule) -> None:
        self.module = module
        order = module.call_order()
        self.contexts: dict[HloComputation, Context] = dict.fromkeys(order, Context.UNREACHED)
        self.contexts[module.entry] = Context.SEQUENTIAL
        for caller in reversed(order):
            own = self.contexts[caller]
            if own is Context.UNREACHED:
                continue
            for instruction in caller:
                sequential = instruction.opcode in _SEQUENTIAL and own is Context.SEQUENTIAL
                given = Context.SEQUENTIAL if sequential else Context.EMBEDDED
                for callee in instruction.called:
                    self.contexts[callee] = _joined(self.contexts[callee], given)

    def sequential(self) -> list[HloComputation]:
        """Computations whose instructions run as part of the program, callees before callers."""
        wanted = (Context.SEQUENTIAL, Context.BOTH)
        return [c for c in self.module.call_order() if self.contexts[c] in wanted]

    def is_flat(self) -> bool:
        """True if each sequential computation has one caller and no computation is called in both ways."""
        for computation, context in self.contexts.items():
            if context is Context.BOTH:
                return False
            if context is Context.SEQUENTIAL and sum(computation.callers.values()) > 1:
                return False
        return True


def _joined(old: Context, new: Context) -> Context:
    if old in (Context.UNREACHED, new):
        return new
    return Context.BOTH


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
        bits = 1 << self._bit[instruction]
        ancestors = self._ancestors
        for before in instruction.operands:
            bits |= ancestors[before]
        for before in instruction.control_predecessors:
            bits |= ancestors[before]
        if ancestors.get(instruction) == bits:
            return False
        ancestors[instruction] = bits
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

"""Callers of each computation, and whether a computation works on whole values or on single elements."""

from __future__ import annotations

from enum import Enum

from mpmd.compile.hlo.computation import HloComputation
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

"""Computations that a program executes instruction by instruction."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.module import HloModule


def sequential(module: HloModule) -> list[HloComputation]:
    """The computations whose instructions run as part of the program."""
    found = [module.entry]
    for computation in found:
        for instruction in computation:
            if instruction.opcode in ("while", "conditional", "call"):
                found += [c for c in instruction.called if c not in found]
    return found

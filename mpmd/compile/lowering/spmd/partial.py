"""Partial results: each device holds a term of a reduction, which a collective joins."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.reducers import simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction

COMPLETE = "complete"
"""Marks a value that is not a partial result, although an `sdy.all_reduce` follows it."""

_IDEMPOTENT = frozenset({"maximum", "minimum", "and", "or"})


def reduces_to(computation: HloComputation, init: HloInstruction) -> str | None:
    """The reduction that joins partial results; None if they cannot be joined.

    Every device begins with the initial value, so it must be an identity of the reduction.
    """
    opcode = simple_opcode(computation)
    if opcode is None or opcode in _IDEMPOTENT:
        return opcode
    if opcode == "xor":
        return None
    while init.opcode in ("broadcast", "reshape", "convert"):
        init = init.operands[0]
    literal = init.literal if init.opcode == "constant" else None
    if literal is None or isinstance(literal, tuple):
        return None
    neutral = 1 if opcode == "multiply" else 0
    return opcode if np.all(np.asarray(literal) == neutral) else None

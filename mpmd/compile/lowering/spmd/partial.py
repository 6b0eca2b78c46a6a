"""Partial results: what devices have each a part of the sum of, and what joins them."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.reducers import simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction

COMPLETE = "complete"
"""Stands for what is no partial result, though an `sdy.all_reduce` follows it."""

_IDEMPOTENT = frozenset({"maximum", "minimum", "and", "or"})


def reduces_to(computation: HloComputation, init: HloInstruction) -> str | None:
    """With what partial results of a reduction are joined; None if they cannot be.

    Every device begins with the initial value, so it has to be one that does no harm when it comes again.
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


def neutral_of(opcode: str, dtype: str) -> float | bool | None:
    """What changes nothing when it is joined; None if nothing does."""
    kind = DTYPES[dtype].kind
    if opcode == "add":
        return False if kind == "pred" else 0
    if opcode == "multiply":
        return 1
    return None

"""Reductions by one operation: its name, and the value that changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.literals import integer_range

SIMPLE = frozenset(["add", "multiply", "maximum", "minimum", "and", "or", "xor"])


def simple_opcode(computation: HloComputation) -> str | None:
    """The opcode of `(a, b) -> opcode(a, b)` on scalars, if the computation has that form."""
    root = computation.root
    if root.opcode not in SIMPLE or len(computation) != 3:
        return None
    numbers = [o.parameter_number for o in root.operands if o.opcode == "parameter"]
    same = all(o.shape is root.shape for o in root.operands)
    return root.opcode if sorted(numbers) == [0, 1] and same else None


def identity_of(opcode: str, dtype: str) -> Any:
    """The scalar that a reduction joins with any value without changing it, but for the sign of a zero."""
    kind, value = DTYPES[dtype].kind, float(opcode == "multiply")
    if opcode == "and":
        value = 1 if kind == "pred" else -1
    elif opcode in ("maximum", "minimum"):
        largest = opcode == "minimum"
        if kind in ("signed", "unsigned"):
            value = integer_range(dtype)[largest]
        else:
            value = largest if kind == "pred" else np.inf if largest else -np.inf
    return np.asarray(value).astype(DTYPES[dtype].numpy)[()]

"""Computations on scalars, applied to whole arrays at once where that is equivalent."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES

SIMPLE = frozenset(["add", "multiply", "maximum", "minimum", "and", "or", "xor"])
_TRANSPARENT = frozenset(["parameter", "constant", "tuple", "get-tuple-element"])


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


def is_pointwise(computation: HloComputation) -> bool:
    """True if it may be applied to arrays: every operation is elementwise."""
    for instruction in computation:
        opcode = instruction.opcode
        if opcode == "call" or opcode == "fusion":
            if not is_pointwise(instruction.to_apply):
                return False
        elif opcode not in _TRANSPARENT and OPCODES[opcode].category not in ELEMENTWISE:
            return False
        arrays = [shape for _, shape in instruction.shape.leaves()]
        if not all(shape.is_scalar for shape in arrays):
            return False
    return True

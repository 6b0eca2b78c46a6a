"""Computations on scalars, applied to whole arrays at once where that is equivalent."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES

_SIMPLE = frozenset(["add", "multiply", "maximum", "minimum", "and", "or", "xor"])
_TRANSPARENT = frozenset(["parameter", "constant", "tuple", "get-tuple-element"])


def simple_opcode(computation: HloComputation) -> str | None:
    """The opcode of `(a, b) -> opcode(a, b)` on scalars, if the computation has that form."""
    root = computation.root
    if root.opcode not in _SIMPLE or len(computation) != 3:
        return None
    numbers = [o.parameter_number for o in root.operands if o.opcode == "parameter"]
    same = all(o.shape is root.shape for o in root.operands)
    return root.opcode if sorted(numbers) == [0, 1] and same else None


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

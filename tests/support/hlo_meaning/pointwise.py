"""Computations on scalars, applied to whole arrays at once where that is equivalent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.values import Rule, Value
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning

_TRANSPARENT = frozenset(["parameter", "constant", "tuple", "get-tuple-element"])


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


def spread(value: Value, dims: tuple[int, ...]) -> Value:
    """Each array broadcast to some dims."""
    if isinstance(value, tuple):
        return tuple(spread(v, dims) for v in value)
    return np.broadcast_to(np.asarray(value), dims)


def _map(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    return engine.apply(instruction.to_apply, operands, instruction.shape.dims)


RULES: dict[str, Rule] = {"map": _map}

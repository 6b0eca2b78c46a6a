"""Semantics of the custom calls that JAX writes into programs, as far as they have their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.evaluator.values import Rule, Value
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError
from tests.support.hlo_meaning.sorting import top_k

if TYPE_CHECKING:
    from mpmd.compile.hlo.evaluator import Evaluator


def _identity(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """Markers for the partitioner and the placement of memory change no value."""
    if instruction.shape.logical is not instruction.operands[0].shape.logical:
        raise HloError(
            f"{instruction.name}: {instruction.custom_call_target} changes the shape: partition the "
            "module first"
        )
    return operands[0]


def _top_k(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    values = instruction.shape.elements[0]
    return top_k(operands[0], values.dtype, values.dims[-1], largest=True)


def _allocate(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """Memory that must be written before it is read: zeros here."""
    return np.zeros(instruction.shape.dims, instruction.shape.numpy_dtype)


TARGETS: dict[str, Rule] = {
    "AllocateBuffer": _allocate,
    "Sharding": _identity,
    "SPMDFullToShardShape": _identity,
    "SPMDShardToFullShape": _identity,
    "TopK": _top_k,
    "annotate_device_placement": _identity,
    "MoveToHost": _identity,
    "MoveToDevice": _identity,
}


def _custom_call(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    rule = TARGETS.get(instruction.custom_call_target)
    if rule is None:
        raise HloError(
            f"{instruction.name}: custom call {instruction.custom_call_target!r} has no meaning here; "
            f"known: {', '.join(TARGETS)}"
        )
    return rule(instruction, operands, engine)


RULES: dict[str, Rule] = {"custom-call": _custom_call}

"""Semantics of the custom calls that JAX writes into programs, as far as they have their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpmd.compile.hlo.evaluator.values import Rule, Value
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError

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


TARGETS: dict[str, Rule] = {
    "Sharding": _identity,
    "SPMDFullToShardShape": _identity,
    "SPMDShardToFullShape": _identity,
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

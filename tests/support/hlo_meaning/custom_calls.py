"""Semantics of the custom calls that JAX writes into programs, as far as they have their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.evaluator.values import Rule, Value, exact, narrow
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError

if TYPE_CHECKING:
    from mpmd.compile.hlo.evaluator.engine import Evaluator


def _identity(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """Markers for the partitioner and the placement of memory change no value."""
    if instruction.shape.logical is not instruction.operands[0].shape.logical:
        raise HloError(
            f"{instruction.name}: {instruction.custom_call_target} changes the shape: partition the "
            "module first"
        )
    return operands[0]


def _lower_factor(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """Cholesky factors of positive definite matrices, which keep the other half, and that they are ones."""
    factors, info = instruction.shape.elements
    value = exact(operands[0], factors.dtype)
    try:
        made = np.linalg.cholesky(value) + np.triu(value, 1)
    except np.linalg.LinAlgError as error:
        raise HloError(f"{instruction.name}: {error}") from error
    return narrow(made, factors.dtype), np.zeros(info.dims, info.numpy_dtype)


TARGETS: dict[str, Rule] = {
    "lapack_spotrf_ffi": _lower_factor,
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

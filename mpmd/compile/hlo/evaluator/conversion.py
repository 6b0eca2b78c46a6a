"""Semantics of changes of the element type: convert, bitcast-convert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, narrow, widen
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import integer_range

if TYPE_CHECKING:
    from mpmd.compile.hlo.evaluator.engine import Evaluator


def convert(array: Array, source: str, target: str) -> Array:
    """Values in another element type.

    Floats to integers: towards zero, NaN to 0, values out of range to the nearest bound.  Integers to
    integers wrap.  Anything to pred: whether it is not zero.  Complex to real: the real part.
    """
    if source == target:
        return array
    kind, goal = DTYPES[source].kind, DTYPES[target].kind
    if kind == "complex" and goal != "complex":
        return convert(array.real, "f32" if source == "c64" else "f64", target)
    if goal == "pred":
        return np.asarray(widen(array, source) != 0)
    if kind == "float" and goal in ("signed", "unsigned"):
        return _float_to_integer(array.astype(np.float64), target)
    if kind == "pred":
        return narrow(array.astype(np.float32 if goal == "float" else np.uint8), target)
    if kind in ("signed", "unsigned") and goal == "float" and DTYPES[target].bits < 32:
        return narrow(array.astype(np.int64 if kind == "signed" else np.uint64).astype(np.float64), target)
    return narrow(array if source == "f64" else widen(array, source), target)


def _float_to_integer(values: Array, target: str) -> Array:
    low, high = integer_range(target)
    over, under = values >= float(high + 1), values <= float(low)
    inside = np.where(over | under | np.isnan(values), 0, np.trunc(values))
    whole = inside.astype(np.uint64 if DTYPES[target].kind == "unsigned" else np.int64)
    bounded = np.where(over, np.array(high, whole.dtype), np.where(under, np.array(low, whole.dtype), whole))
    return narrow(bounded, target)


def _convert(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return convert(operands[0], instruction.operands[0].shape.dtype, instruction.shape.dtype)


def _bitcast_convert(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    """Between types of one width; `hlo-bitcast-convert-expander` has expanded the others."""
    raw = np.ascontiguousarray(operands[0])  # may represent many scalars
    return raw.view(instruction.shape.numpy_dtype).reshape(operands[0].shape)


RULES: dict[str, Rule] = {
    "bitcast-convert": _bitcast_convert,
    "convert": _convert,
}

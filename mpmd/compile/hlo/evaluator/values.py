"""Values at run time: NumPy arrays in logical order, tuples of values, tokens.

All rules share the conversions between element types here, which round once, and the neutral value of each
reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import HloError

if TYPE_CHECKING:
    from mpmd.compile.hlo.evaluator import Evaluator


Array = Any
"""A NumPy array.  Its operators are typed as Any by NumPy, so a stricter name would only add casts."""


Value = Any
"""An `Array`, or a tuple of values."""

Rule = Callable[[HloInstruction, Sequence[Value], "Evaluator"], Value]
"""What an opcode does on one device: (instruction, operand values, engine) → value."""


def check_value(value: Value, shape: Shape, what: str) -> None:
    """A value must have the shape it is used with.

    Raises:
        HloError: it does not; names `what`.
    """
    if shape.is_tuple:
        if not isinstance(value, tuple) or len(value) != len(shape.elements):
            raise HloError(
                f"{what} must be a tuple of {len(shape.elements)} values for {shape}, got {describe(value)}"
            )
        for i, (part, element) in enumerate(zip(value, shape.elements)):
            check_value(part, element, f"element {i} of {what}")
    elif shape.is_array:
        fits = (
            isinstance(value, np.ndarray) and value.dtype == shape.numpy_dtype and value.shape == shape.dims
        )
        if not fits:
            raise HloError(f"{what} must be {shape.logical}, got {describe(value)}")


def describe(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return f"array {value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return "(" + ", ".join(describe(v) for v in value) + ")"
    return repr(value)


_WIDE = {"float": np.dtype(np.float32), "signed": np.dtype(np.int32), "unsigned": np.dtype(np.uint32)}
_NATIVE = frozenset(
    ["pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f32", "f64", "c64", "c128"]
)


def widen(array: Array, dtype: str) -> Array:
    """Values NumPy can compute with: narrow floats as f32, narrow integers as 32 bits; others as they are."""
    return array if dtype in _NATIVE else array.astype(_WIDE[DTYPES[dtype].kind])


def exact(array: Array, dtype: str) -> Array:
    """Values with room for rounding: floats as f64, complex as c128; others as `widen` gives."""
    kind = DTYPES[dtype].kind
    if kind == "float":
        return array.astype(np.float64)
    return array.astype(np.complex128) if kind == "complex" else widen(array, dtype)


def narrow(array: Array, dtype: str) -> Array:
    """Round (floats) or wrap (integers) to an element type."""
    info = DTYPES[dtype]
    values = np.asarray(array)
    if values.dtype == info.numpy:
        return values
    if info.bits < 8 and info.is_integral:
        low = values.astype(np.int64) & ((1 << info.bits) - 1)
        if info.kind == "signed":
            low = np.where(low >> (info.bits - 1), low - (1 << info.bits), low)
        return low.astype(info.numpy)
    if info.bits < 32 and info.kind == "float" and values.dtype != np.float32:
        values = _round_to_odd(values.astype(np.float64))
    return values.astype(info.numpy)


def _round_to_odd(values: Array) -> Array:
    """f64 → f32 such that a second rounding to a narrower type gives what one rounding would have given."""
    rounded = values.astype(np.float32)
    inexact = np.isfinite(rounded) & (rounded.astype(np.float64) != values)
    toward_zero = np.where(
        np.abs(rounded.astype(np.float64)) > np.abs(values), np.nextafter(rounded, np.float32(0)), rounded
    )
    bits = np.ascontiguousarray(toward_zero, dtype=np.float32).view(np.uint32).reshape(values.shape)
    return np.where(inexact, (bits | np.uint32(1)).view(np.float32), rounded)


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

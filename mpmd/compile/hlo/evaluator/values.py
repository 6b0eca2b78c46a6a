"""Values at run time: NumPy arrays in logical order, tuples of values, tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import HloError

if TYPE_CHECKING:
    from mpmd.compile.hlo.evaluator.engine import Evaluator

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
    made = np.asarray(array)
    if made.dtype == info.numpy:
        return made
    if info.bits < 8 and info.is_integral:
        low = made.astype(np.int64) & ((1 << info.bits) - 1)
        if info.kind == "signed":
            low = np.where(low >> (info.bits - 1), low - (1 << info.bits), low)
        return low.astype(info.numpy)
    if info.bits < 32 and info.kind == "float" and made.dtype != np.float32:
        made = _round_to_odd(made.astype(np.float64))
    return made.astype(info.numpy)


def _round_to_odd(values: Array) -> Array:
    """f64 → f32 such that a second rounding to a narrower type gives what one rounding would have given."""
    rounded = values.astype(np.float32)
    inexact = np.isfinite(rounded) & (rounded.astype(np.float64) != values)
    toward_zero = np.where(
        np.abs(rounded.astype(np.float64)) > np.abs(values), np.nextafter(rounded, np.float32(0)), rounded
    )
    bits = np.ascontiguousarray(toward_zero, dtype=np.float32).view(np.uint32).reshape(values.shape)
    return np.where(inexact, (bits | np.uint32(1)).view(np.float32), rounded)

"""Semantics of rounding on request: reduce-precision, stochastic-convert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, convert
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning

_LAYOUT = {"bf16": (8, 7), "f16": (5, 10), "f32": (8, 23), "f64": (11, 52)}
"""Exponent and mantissa bits of the IEEE-like types."""


def reduce_precision(array: Array, dtype: str, exponent: int, mantissa: int) -> Array:
    """Round to a float with fewer exponent and mantissa bits, kept in the old type.

    To nearest, ties to even; overflow becomes infinite, underflow becomes zero; NaN stays.

    Raises:
        HloError: the element type is not a float of this kind.
    """
    if dtype not in _LAYOUT:
        raise HloError(f"reduce-precision of {dtype} is not supported; it takes {', '.join(_LAYOUT)}")
    own_exponent, own_mantissa = _LAYOUT[dtype]
    bits = 1 + own_exponent + own_mantissa
    unsigned = np.dtype(f"u{bits // 8}")
    raw = np.ascontiguousarray(array).view(unsigned).reshape(array.shape).astype(np.uint64)
    sign = raw & np.uint64(1 << (bits - 1))
    rest = raw ^ sign
    if mantissa < own_mantissa:
        dropped = own_mantissa - mantissa
        half = np.uint64((1 << (dropped - 1)) - 1)
        last = (rest >> np.uint64(dropped)) & np.uint64(1)
        rest = (rest + half + last) & ~np.uint64((1 << dropped) - 1)
    if exponent < own_exponent:
        bias = (1 << (own_exponent - 1)) - 1
        limit = (1 << (exponent - 1)) - 1
        field = rest >> np.uint64(own_mantissa)
        infinite = np.uint64(((1 << own_exponent) - 1) << own_mantissa)
        rest = np.where(field > np.uint64(bias + limit), infinite, rest)
        rest = np.where(field <= np.uint64(bias - limit), np.uint64(0), rest)
    made = (sign | rest).astype(unsigned).view(DTYPES[dtype].numpy).reshape(array.shape)
    quiet = array if mantissa > 0 else np.copysign(np.array(np.inf, array.dtype), array)
    return np.where(np.isnan(array), quiet, made)


def _reduce_precision(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    exponent, mantissa = (cast(int, instruction.attributes[k]) for k in ("exponent_bits", "mantissa_bits"))
    return reduce_precision(operands[0], instruction.shape.dtype, exponent, mantissa)


def _stochastic_convert(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """Round away from zero with the probability of the fraction: if the random bits are below it."""
    target = instruction.shape.dtype
    if not DTYPES[target].is_integral:
        raise HloError(f"stochastic-convert to {target} is not supported; it takes integers")
    values = operands[0].astype(np.float64)
    bits = instruction.operands[1].shape.info.bits
    whole = np.trunc(values)
    fraction = np.floor(np.abs(values - whole) * 2.0**bits)
    up = operands[1].astype(np.float64) < fraction
    finite = np.isfinite(values)
    return convert(np.where(finite & up, whole + np.sign(values), values), "f64", target)


RULES: dict[str, Rule] = {"reduce-precision": _reduce_precision, "stochastic-convert": _stochastic_convert}

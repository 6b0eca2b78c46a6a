"""Semantics of elementwise operations.

Narrow types are computed in f32 or 32-bit integers and rounded or wrapped once; transcendental functions
of f32 are computed in f64, so that the result is the nearest f32 but for rare ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, exact, narrow, widen
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import integer_range
from mpmd.errors import HloError

if TYPE_CHECKING:
    from mpmd.compile.hlo.evaluator import Evaluator

_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    """The error function, of f64."""
    return np.asarray(_erf(x)).astype(np.float64)


def logistic(x: Array) -> Array:
    """`1 / (1 + exp(-x))`."""
    return 1 / (1 + np.exp(-x))


def reciprocal_root(x: Array) -> Array:
    """`1 / sqrt(x)`."""
    return 1 / np.sqrt(x)


def away_from_zero(x: Array) -> Array:
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(1, x), whole).astype(x.dtype)


def sign(x: Array) -> Array:
    """-1, 0 or 1; zeros and NaN stay, complex numbers are scaled to length 1."""
    if x.dtype.kind == "c":
        length = np.abs(x)
        scaled: Array = np.where(length == 0, 0, x / np.where(length == 0, 1, length))
        return scaled.astype(x.dtype)
    if x.dtype.kind == "f":
        signed: Array = np.where((x == 0) | np.isnan(x), x, np.copysign(1, x))
        return signed.astype(x.dtype)
    return np.sign(x)


_EXACT: dict[str, Callable[[Array], Array]] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "cosine": np.cos,
    "cosh": np.cosh,
    "erf": erf,
    "exponential": np.exp,
    "exponential-minus-one": np.expm1,
    "log": np.log,
    "log-plus-one": np.log1p,
    "logistic": logistic,
    "rsqrt": reciprocal_root,
    "sine": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
}

_PLAIN: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "floor": np.floor,
    "imag": np.imag,
    "is-finite": np.isfinite,
    "negate": lambda x: np.negative(x),
    "not": lambda x: np.logical_not(x) if x.dtype == np.bool_ else np.invert(x),
    "real": np.real,
    "round-nearest-afz": away_from_zero,
    "round-nearest-even": np.rint,
    "sign": sign,
}


def _copy(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    return operands[0]


def _unsigned(array: Array, dtype: str) -> tuple[Array, int]:
    bits = DTYPES[dtype].bits
    return array.astype(np.int64).astype(np.uint64) & np.uint64((1 << bits) - 1), bits


def _ones(x: Array, dtype: str) -> Array:
    return np.bitwise_count(_unsigned(x, dtype)[0])


def _leading_zeros(x: Array, dtype: str) -> Array:
    left, bits = _unsigned(x, dtype)
    count = np.full(left.shape, bits, np.int64)
    while np.any(left):
        count = np.where(left != 0, count - 1, count)
        left = left >> np.uint64(1)
    return count


_OF_BITS: dict[str, Callable[[Array, str], Array]] = {"count-leading-zeros": _leading_zeros, "popcnt": _ones}


# -- two operands -----------------------------------------------------------------------------------


def _divide(a: Array, b: Array, dtype: str) -> Array:
    """Integers: towards zero; by zero gives all ones; the smallest by -1 gives itself."""
    if DTYPES[dtype].kind in ("float", "complex"):
        return a / b
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    if DTYPES[dtype].kind == "unsigned":
        return np.where(b == 0, np.array(integer_range(dtype)[1], a.dtype), a // safe)
    smallest = (a == integer_range(dtype)[0]) & (b == -1)
    safe = np.where(smallest, 1, safe).astype(a.dtype)
    quotient = a // safe
    quotient = quotient + ((quotient < 0) & (quotient * safe != a)).astype(a.dtype)
    return np.where(b == 0, -1, quotient).astype(a.dtype)


def _remainder(a: Array, b: Array, dtype: str) -> Array:
    """The sign of the dividend; integers by zero give the dividend."""
    if DTYPES[dtype].kind == "float":
        return np.fmod(a, b)
    safe = np.where((b == 0) | (b == -1), 1, b) if DTYPES[dtype].kind == "signed" else np.where(b == 0, 1, b)
    return np.where(b == 0, a, np.fmod(a, safe.astype(a.dtype))).astype(a.dtype)


def _power(a: Array, b: Array, dtype: str) -> Array:
    """Integers: by squaring, wrapping; a negative exponent gives 0 but for bases 1 and -1."""
    if DTYPES[dtype].kind in ("float", "complex"):
        return np.power(a, b)
    base, exponent = np.broadcast_arrays(a, b)
    result = np.ones_like(base)
    left, square = np.where(exponent < 0, 0, exponent).astype(base.dtype), base.copy()
    while np.any(left):
        result = np.where(left & 1, result * square, result).astype(base.dtype)
        square = (square * square).astype(base.dtype)
        left = left >> 1
    odd = np.where((base == -1) & (exponent & 1 == 1), -1, 1)
    negative = np.where(base == 1, 1, np.where(base == -1, odd, 0)).astype(base.dtype)
    return np.where(exponent < 0, negative, result).astype(base.dtype)


def _shift(kind: str) -> Callable[[Array, Array, str], Array]:
    def shift(a: Array, b: Array, dtype: str) -> Array:
        """A shift by the width or more, or by a negative number, moves every bit out.

        An arithmetic shift takes the highest bit for the sign, in unsigned integers too.
        """
        bits = DTYPES[dtype].bits
        inside = (b >= 0) & (b < bits)
        amount = np.where(inside, b, 0)
        raw = _unsigned(a, dtype)[0]
        if kind == "arithmetic":
            half = 1 << (bits - 1)
            signed = raw.astype(np.int64) if bits == 64 else (raw.astype(np.int64) ^ half) - half
            return np.right_shift(signed, np.where(inside, b, bits - 1).astype(np.int64))
        moved = raw << amount.astype(np.uint64) if kind == "left" else raw >> amount.astype(np.uint64)
        return np.where(inside, moved, np.uint64(0)).astype(np.uint64)

    return shift


def _multiply_high(a: Array, b: Array, dtype: str) -> Array:
    product = a.astype(object) * b.astype(object)
    return np.asarray(product >> DTYPES[dtype].bits).astype(
        np.int64 if DTYPES[dtype].kind == "signed" else np.uint64
    )


def _maximum(a: Array, b: Array) -> Array:
    """The larger; NaN if either is NaN, and 0 is larger than -0."""
    if a.dtype.kind != "f":
        return np.maximum(a, b)
    return np.where((a == 0) & (b == 0), a + b, np.maximum(a, b))


def _minimum(a: Array, b: Array) -> Array:
    return -_maximum(-a, -b) if a.dtype.kind == "f" else np.minimum(a, b)


def _logical(
    booleans: Callable[..., Array], integers: Callable[..., Array]
) -> Callable[[Array, Array, str], Array]:
    return lambda a, b, dtype: booleans(a, b) if dtype == "pred" else integers(a, b)


_BINARY: dict[str, Callable[[Array, Array, str], Array]] = {
    "add": lambda a, b, dtype: np.logical_or(a, b) if dtype == "pred" else a + b,
    "and": _logical(np.logical_and, np.bitwise_and),
    "divide": _divide,
    "maximum": lambda a, b, dtype: _maximum(a, b),
    "minimum": lambda a, b, dtype: _minimum(a, b),
    "mulhi": _multiply_high,
    "multiply": lambda a, b, dtype: np.logical_and(a, b) if dtype == "pred" else a * b,
    "or": _logical(np.logical_or, np.bitwise_or),
    "remainder": _remainder,
    "shift-left": _shift("left"),
    "shift-right-arithmetic": _shift("arithmetic"),
    "shift-right-logical": _shift("right"),
    "subtract": lambda a, b, dtype: np.logical_xor(a, b) if dtype == "pred" else a - b,
    "xor": _logical(np.logical_xor, np.bitwise_xor),
}

_BINARY_EXACT: dict[str, Callable[[Array, Array], Array]] = {
    "atan2": np.arctan2,
}


def combine(opcode: str, a: Array, b: Array, dtype: str) -> Array:
    """A binary operation on arrays of one element type; also the step of simple reductions.

    Raises:
        HloError: the operation is undefined for complex numbers.
    """
    if opcode == "power" or (opcode == "divide" and DTYPES[dtype].kind == "complex"):
        step = _power if opcode == "power" else _divide
        return narrow(step(exact(a, dtype), exact(b, dtype), dtype), dtype)
    if opcode in _BINARY_EXACT:
        if DTYPES[dtype].kind == "complex":
            raise HloError(f"{opcode} of complex values is not supported")
        return narrow(_BINARY_EXACT[opcode](exact(a, dtype), exact(b, dtype)), dtype)
    return narrow(_BINARY[opcode](widen(a, dtype), widen(b, dtype), dtype), dtype)


def compute(opcode: str, operands: Sequence[Array], dtype: str, result: str) -> Array:
    """An elementwise operation that has no attributes.

    Args:
        opcode: its name.
        operands: arrays of one element type; the first of a select is of booleans.
        dtype: that element type.
        result: the element type of the result.

    Raises:
        HloError: the operation has no meaning for complex numbers.
    """
    if opcode in _EXACT:
        return narrow(_EXACT[opcode](exact(operands[0], dtype)), result)
    if opcode in _PLAIN:
        return narrow(_PLAIN[opcode](widen(operands[0], dtype)), result)
    if opcode in _OF_BITS:
        return narrow(_OF_BITS[opcode](operands[0], dtype), result)
    if opcode == "select":
        return np.where(*operands)
    if opcode == "clamp":
        low, value, high = (widen(v, dtype) for v in operands)
        return narrow(_minimum(_maximum(low, value), high), dtype)
    return combine(opcode, operands[0], operands[1], dtype)


def _elementwise(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    dtype = instruction.operands[-1].shape.dtype
    return compute(instruction.opcode, operands, dtype, instruction.shape.dtype)


def _complex(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    real, imaginary = operands
    pairs = np.empty(np.broadcast_shapes(real.shape, imaginary.shape), instruction.shape.numpy_dtype)
    pairs.real, pairs.imag = real, imaginary
    return pairs


COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "GE": np.greater_equal,
    "GT": np.greater,
    "LE": np.less_equal,
    "LT": np.less,
}


def total_order_key(array: Array, dtype: str) -> Array:
    """Integers that compare as floats do in total order: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    if DTYPES[dtype].kind != "float":
        return array
    bits = DTYPES[dtype].bits
    if bits < 8:
        return total_order_key(array.astype(np.float32), "f32")
    raw = np.ascontiguousarray(array).view(f"i{bits // 8}").reshape(array.shape)
    return np.where(raw < 0, raw ^ np.array(integer_range(f"s{bits}")[1], raw.dtype), raw)


def _compare(instruction: HloInstruction, operands: Sequence[Value], engine: Evaluator) -> Value:
    dtype = instruction.operands[0].shape.dtype
    direction = COMPARE[instruction.direction]
    if instruction.attributes.get("comparison_type") == "TOTALORDER":
        return np.asarray(direction(total_order_key(operands[0], dtype), total_order_key(operands[1], dtype)))
    return np.asarray(direction(widen(operands[0], dtype), widen(operands[1], dtype)))


RULES: dict[str, Rule] = {
    **dict.fromkeys([*_EXACT, *_PLAIN, *_OF_BITS, *_BINARY, *_BINARY_EXACT], _elementwise),
    **dict.fromkeys(["power", "clamp", "select"], _elementwise),
    "compare": _compare,
    "complex": _complex,
    "copy": _copy,
}

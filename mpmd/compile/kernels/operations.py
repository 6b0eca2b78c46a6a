"""The elementwise operations and reductions of kernels, by HLO name: semantics and costs.

One row per operation.  A target's printer has a table with the same names; a test compares them, so that a
missing operation is found when a kernel is planned and not when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.kernels.narrow import NARROW

Array = Any

NUMPY_DTYPE: dict[str, Any] = {
    "pred": np.bool_,
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    **{name: DTYPES[name].numpy for name in NARROW},
}
DTYPE_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in NUMPY_DTYPE.items()}
FLOATS = ("bf16", "f16", "f32", "f64")
SIGNED = ("s8", "s16", "s32", "s64")
UNSIGNED = ("u8", "u16", "u32", "u64")
INTEGERS = SIGNED + UNSIGNED


@dataclass(frozen=True)
class ElementwiseOperation:
    """An elementwise operation.

    Attributes:
        name: its HLO name.
        arity: how many operands it takes.
        meaning: NumPy function of the operands, already in the type they are computed in.
        cycles: cost of one vector of f32, in units of a multiply-add.
        dtypes: operand dtypes that it is defined for.
        result: `same` as the first operand, `pred`, or `given` (by the node).
    """

    name: str
    arity: int
    meaning: Callable[..., Array]
    cycles: float
    dtypes: tuple[str, ...]
    result: str = "same"

    @property
    def is_expensive(self) -> bool:
        """Whether keeping a result is cheaper than computing it a second time."""
        return self.cycles >= 8


def _integer_divide(a: Array, b: Array) -> Array:
    """Towards zero; by zero all bits are set; the smallest number by -1 is itself."""
    with np.errstate(all="ignore"):
        safe = np.where(b == 0, np.ones_like(b), b)
        quotient: Array = a // safe
        if np.issubdtype(a.dtype, np.signedinteger):
            quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
            quotient = np.where(safe == -1, np.negative(a), quotient)
        return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def _divide(a: Array, b: Array) -> Array:
    return a / b if np.issubdtype(a.dtype, np.floating) else _integer_divide(a, b)


def _remainder(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.floating):
        return np.fmod(a, b)
    with np.errstate(all="ignore"):
        return np.where(b == 0, a, a - _integer_divide(a, b) * b).astype(a.dtype)


def _shift(a: Array, amount: Array, how: str) -> Array:
    bits = a.dtype.itemsize * 8
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    count = amount.view(unsigned)
    inside = count < bits
    count = np.where(inside, count, 0).astype(unsigned)
    if how == "left":
        return np.where(inside, a.view(unsigned) << count, 0).astype(unsigned).view(a.dtype)
    if how == "logical":
        return np.where(inside, a.view(unsigned) >> count, 0).astype(unsigned).view(a.dtype)
    signed = a.view(np.dtype(f"i{a.dtype.itemsize}"))
    moved = signed >> np.where(inside, count, bits - 1).astype(signed.dtype)
    return moved.astype(signed.dtype).view(a.dtype)


def _power(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.floating):
        return np.power(a, b)
    result, base, negative = np.ones_like(a), a.copy(), b < 0
    exponent: Array = np.where(negative, 0, b).astype(b.dtype)
    with np.errstate(all="ignore"):
        while exponent.any():
            result = np.where(exponent & 1, result * base, result).astype(a.dtype)
            base, exponent = (base * base).astype(a.dtype), exponent >> 1
    ones = np.where(a == 1, 1, np.where(a == -1, np.where(b & 1, -1, 1), 0)) if negative.any() else 0
    return np.where(negative, ones, result).astype(a.dtype)


def _nearest_away(a: Array) -> Array:
    half = np.nextafter(np.asarray(0.5, a.dtype), np.asarray(0, a.dtype))  # 0.5 would lift 0.49999997
    return np.copysign(np.trunc(np.abs(a) + half), a)


def _sign(a: Array) -> Array:
    picked: Array = np.where(a == 0, a, np.sign(a))
    return picked.astype(a.dtype)


def _erf(a: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(a.astype(np.float64)).astype(a.dtype)


def _logistic(a: Array) -> Array:
    e = np.exp(-np.abs(a.astype(np.float64)))
    return (np.where(a < 0, e, 1) / (1 + e)).astype(a.dtype)


def _clz(a: Array) -> Array:
    bits, unsigned = a.dtype.itemsize * 8, a.view(f"u{a.dtype.itemsize}")
    count = np.full(a.shape, bits, np.int64)
    for bit in range(bits):
        count = np.where(unsigned >> np.array(bit, unsigned.dtype) != 0, bits - 1 - bit, count)
    return count.astype(a.dtype)


_MEANINGS: list[ElementwiseOperation] = []


def _row(
    name: str,
    arity: int,
    meaning: Callable[..., Array],
    cycles: float,
    dtypes: tuple[str, ...],
    result: str = "same",
) -> None:
    _MEANINGS.append(ElementwiseOperation(name, arity, meaning, cycles, dtypes, result))


_NUMBERS, _LOGIC = FLOATS + INTEGERS, (*INTEGERS, "pred")
_row("add", 2, lambda a, b: a | b if a.dtype == np.bool_ else a + b, 1, (*_NUMBERS, "pred"))
_row("subtract", 2, lambda a, b: a - b, 1, _NUMBERS)
_row("multiply", 2, lambda a, b: a & b if a.dtype == np.bool_ else a * b, 1, (*_NUMBERS, "pred"))
_row("divide", 2, _divide, 10, _NUMBERS)
_row("remainder", 2, _remainder, 60, _NUMBERS)
_row("maximum", 2, np.maximum, 2, (*_NUMBERS, "pred"))
_row("minimum", 2, np.minimum, 2, (*_NUMBERS, "pred"))
_row("power", 2, _power, 60, _NUMBERS)
_row("atan2", 2, np.arctan2, 300, FLOATS)
_row("and", 2, np.bitwise_and, 1, _LOGIC)
_row("or", 2, np.bitwise_or, 1, _LOGIC)
_row("xor", 2, np.bitwise_xor, 1, _LOGIC)
_row("not", 1, np.invert, 1, _LOGIC)
_row("shift-left", 2, lambda a, b: _shift(a, b, "left"), 2, INTEGERS)
_row("shift-right-arithmetic", 2, lambda a, b: _shift(a, b, "arithmetic"), 2, INTEGERS)
_row("shift-right-logical", 2, lambda a, b: _shift(a, b, "logical"), 2, INTEGERS)
_row("negate", 1, np.negative, 1, _NUMBERS)
_row("abs", 1, np.abs, 1, FLOATS + SIGNED)
_row("sign", 1, _sign, 3, FLOATS + SIGNED)
_row("floor", 1, np.floor, 1, FLOATS)
_row("ceil", 1, np.ceil, 1, FLOATS)
_row("round-nearest-even", 1, np.rint, 1, FLOATS)
_row("round-nearest-afz", 1, _nearest_away, 4, FLOATS)
_row("exponential", 1, np.exp, 14, FLOATS)
_row("exponential-minus-one", 1, np.expm1, 22, FLOATS)
_row("log", 1, np.log, 26, FLOATS)
_row("log-plus-one", 1, np.log1p, 32, FLOATS)
_row("logistic", 1, _logistic, 28, FLOATS)
_row("tanh", 1, np.tanh, 24, FLOATS)
_row("tan", 1, np.tan, 200, FLOATS)
_row("sine", 1, np.sin, 30, FLOATS)
_row("cosine", 1, np.cos, 30, FLOATS)
_row("erf", 1, _erf, 26, FLOATS)
_row("sqrt", 1, np.sqrt, 14, FLOATS)
_row("rsqrt", 1, lambda a: np.asarray(1, a.dtype) / np.sqrt(a), 24, FLOATS)
_row("cbrt", 1, np.cbrt, 200, FLOATS)
_row("is-finite", 1, np.isfinite, 2, FLOATS, "pred")
_row("popcnt", 1, lambda a: np.bitwise_count(a.view(f"u{a.dtype.itemsize}")).astype(a.dtype), 4, INTEGERS)
_row("count-leading-zeros", 1, _clz, 4, INTEGERS)
_row("clamp", 3, lambda low, x, high: np.minimum(np.maximum(x, low), high), 3, _NUMBERS)
_row("select", 3, np.where, 1, (*_NUMBERS, "pred", *NARROW))
for _direction, _compare in (
    ("eq", np.equal),
    ("ne", np.not_equal),
    ("lt", np.less),
    ("le", np.less_equal),
    ("gt", np.greater),
    ("ge", np.greater_equal),
):
    _row(f"compare-{_direction}", 2, _compare, 1, (*_NUMBERS, "pred"), "pred")
_row("convert", 1, lambda a: a, 1, (*_NUMBERS, "pred", *NARROW), "given")
_row("bitcast-convert", 1, lambda a: a, 0, (*_NUMBERS, *NARROW), "given")

OPERATIONS: dict[str, ElementwiseOperation] = {row.name: row for row in _MEANINGS}


@dataclass(frozen=True)
class Reduction:
    """A way to combine many values into one.

    Attributes:
        name: name of the binary operation.
        meaning: NumPy ufunc.
        dtypes: dtypes that it is defined for.
    """

    name: str
    meaning: Any
    dtypes: tuple[str, ...]

    def identity(self, dtype: str) -> float | int | bool:
        """The identity of the reduction."""
        if self.name == "add":
            return False if dtype == "pred" else 0
        if self.name == "multiply":
            return True if dtype == "pred" else 1
        if self.name in ("and", "or", "xor"):
            return (True if dtype == "pred" else -1) if self.name == "and" else 0
        largest = self.name == "minimum"
        if dtype == "pred":
            return largest
        if dtype in FLOATS:
            return float("inf") if largest else float("-inf")
        info = np.iinfo(NUMPY_DTYPE[dtype])
        return int(info.max if largest else info.min)


REDUCTIONS: dict[str, Reduction] = {
    r.name: r
    for r in (
        Reduction("add", np.add, (*_NUMBERS, "pred")),
        Reduction("multiply", np.multiply, (*_NUMBERS, "pred")),
        Reduction("maximum", np.maximum, (*_NUMBERS, "pred")),
        Reduction("minimum", np.minimum, (*_NUMBERS, "pred")),
        Reduction("and", np.bitwise_and, _LOGIC),
        Reduction("or", np.bitwise_or, _LOGIC),
        Reduction("xor", np.bitwise_xor, _LOGIC),
    )
}

"""The elementwise operations and reductions in Triton: one cell per operation.

`{0}` `{1}` `{2}` are the operands, `{t}` their type, `{u}` and `{s}` the unsigned and signed type of its
size, `{n}` its bits and `{last}` one less.  Functions of `libdevice` are NVIDIA's, exact to a few units in
the last place; our own are in `PRELUDE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpmd.compile.backends.native_gpu.triton.conversions import BITS, CONVERSIONS, REGISTER
from mpmd.compile.kernels.operations import FLOATS

_FEW_EXPONENTS = 100
"""Powers of two below it have a normal reciprocal."""
_NAN = "propagate_nan=tl.PropagateNan.ALL"
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INSIDE = "({1} >= 0) & ({1} < {n})"
_UNSIGNED = "{0}.to({u}, bitcast=True)"

ANY: dict[str, str] = {
    "add": "({0} + {1})",
    "subtract": "({0} - {1})",
    "multiply": "({0} * {1})",
    "negate": "(-{0})",
    "maximum": f"tl.maximum({{0}}, {{1}}, {_NAN})",
    "minimum": f"tl.minimum({{0}}, {{1}}, {_NAN})",
    "clamp": f"tl.minimum(tl.maximum({{1}}, {{0}}, {_NAN}), {{2}}, {_NAN})",
    "select": "tl.where({0}, {1}, {2})",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, {0})).to({t})",
    **{f"compare-{name}": f"({{0}} {sign} {{1}})" for name, sign in _COMPARE.items()},
}
FLOAT: dict[str, str] = {
    "divide": "tl.div_rn({0}, {1})",  # `/` multiplies by a reciprocal: 41 / 41 is less than 1
    "remainder": "libdevice.fmod({0}, {1})",
    "power": "libdevice.pow({0}, {1})",
    "atan2": "libdevice.atan2({0}, {1})",
    "abs": "tl.abs({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round-nearest-even": "libdevice.rint({0})",
    "round-nearest-afz": "libdevice.round({0})",
    "exponential": "tl.exp({0})",
    "exponential-minus-one": "libdevice.expm1({0})",
    "log": "tl.log({0})",
    "log-plus-one": "libdevice.log1p({0})",
    "logistic": "(1.0 / (1.0 + tl.exp(-{0})))",
    "tanh": "libdevice.tanh({0})",
    "tan": "libdevice.tan({0})",
    "sine": "libdevice.sin({0})",
    "cosine": "libdevice.cos({0})",
    "erf": "libdevice.erf({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "cbrt": "libdevice.cbrt({0})",
    "is-finite": "(tl.abs({0}) < float('inf'))",
}
DOUBLE: dict[str, str] = {**FLOAT, "divide": "({0} / {1})", "sqrt": "tl.sqrt({0})"}
"""F64 has no approximate operations."""
INTEGER: dict[str, str] = {
    "divide": "integer_divide({0}, {1}).to({t})",
    "remainder": "integer_remainder({0}, {1}).to({t})",
    "power": "integer_power({0}, {1}, {n}).to({t})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "not": "(~{0})",
    "abs": "tl.where({0} < 0, -{0}, {0})",
    "shift-left": f"tl.where({_INSIDE}, {{0}} << ({{1}} & {{last}}), 0).to({{t}})",
    "shift-right-logical": f"tl.where({_INSIDE}, {_UNSIGNED} >> ({{1}} & {{last}}).to({{u}}), 0)"
    ".to({u}).to({t}, bitcast=True)",
    "shift-right-arithmetic": "({0}.to({s}, bitcast=True) >> "
    f"tl.where({_INSIDE}, {{1}}, {{last}}).to({{s}})).to({{t}}, bitcast=True)",
    "popcnt": f"libdevice.popc({_UNSIGNED}.to({{wide}})).to({{t}})",
    "count-leading-zeros": f"(libdevice.clz({_UNSIGNED}.to({{wide}})) - {{excess}}).to({{t}})",
}
PRED: dict[str, str] = {
    "add": "({0} | {1})",
    "multiply": "({0} & {1})",
    "maximum": "({0} | {1})",
    "minimum": "({0} & {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "not": "({0} == 0)",
    "select": ANY["select"],
    **{
        f"compare-{name}": f"({{0}}.to(tl.int32) {sign} {{1}}.to(tl.int32))"
        for name, sign in _COMPARE.items()
    },
}

PRELUDE = (
    '''
@triton.jit
def add(a, b):
    return a + b

@triton.jit
def multiply(a, b):
    return a * b

@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def bitwise_and(a, b):
    return a & b

@triton.jit
def bitwise_or(a, b):
    return a | b

@triton.jit
def bitwise_xor(a, b):
    return a ^ b

@triton.jit
def integer_divide(a, b):
    """Towards zero; by zero gives all ones; the smallest number by -1 gives itself."""
    zero, minus = b == 0, (b < 0) & (b + 1 == 0)
    q = a // tl.where(zero | minus, b - b + 1, b)
    return tl.where(zero, b - b - 1, tl.where(minus, a - a - a, q))

@triton.jit
def integer_remainder(a, b):
    """The sign of the dividend; by zero gives the dividend."""
    zero, minus = b == 0, (b < 0) & (b + 1 == 0)
    safe = tl.where(zero | minus, b - b + 1, b)
    return tl.where(zero, a, a - a // safe * safe)

@triton.jit
def integer_power(a, b, bits: tl.constexpr):
    """By squaring; a negative exponent gives 0 but for bases 1 and -1."""
    result, square, left = a - a + 1, a, tl.where(b < 0, b - b, b)
    for _ in range(bits):
        result = tl.where((left & 1) != 0, result * square, result)
        square = square * square
        left = left >> 1
    unit = tl.where((a == 1) | ((a + 1 == 0) & ((b & 1) == 0)), 1, tl.where(a + 1 == 0, -1, 0))
    return tl.where(b < 0, unit.to(a.dtype), result)

@triton.jit
def atomic_float_maximum(floats, signed, unsigned, value, mask, nan: tl.constexpr):
    """Bits of positive floats are in order, bits of negative ones in the opposite; NaN is above all."""
    bits = value.to(signed.dtype.element_ty, bitcast=True)
    old = tl.load(floats, mask=mask, other=0.0)  # a NaN stays until it is one that wins
    bits = tl.where((value != value) | (old != old), nan, bits)
    tl.atomic_max(signed, bits, mask=mask & (bits >= 0), sem="relaxed")
    bits, mask = bits.to(unsigned.dtype.element_ty, bitcast=True), mask & (bits < 0)
    tl.atomic_min(unsigned, bits, mask=mask, sem="relaxed")

@triton.jit
def atomic_float_minimum(floats, signed, unsigned, value, mask, nan: tl.constexpr):
    """As the maximum; the NaN that wins is a negative one."""
    bits = value.to(signed.dtype.element_ty, bitcast=True)
    old = tl.load(floats, mask=mask, other=0.0)
    bits = tl.where((value != value) | (old != old), nan, bits)
    tl.atomic_min(signed, bits, mask=mask & (bits >= 0), sem="relaxed")
    bits, mask = bits.to(unsigned.dtype.element_ty, bitcast=True), mask & (bits < 0)
    tl.atomic_max(unsigned, bits, mask=mask, sem="relaxed")
'''
    + CONVERSIONS
)
"""Triton source of the functions that kernels call, beside those of `libdevice`: combining values of
reductions, HLO's arithmetic of integers, conversions."""

COMBINE = {
    "add": "add",
    "multiply": "multiply",
    "maximum": "maximum",
    "minimum": "minimum",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
"""Reduction → its combining function."""
_COMBINE_PRED = {"add": "maximum", "or": "maximum", "multiply": "minimum", "and": "minimum"}

ATOMIC = {"add": "add", "maximum": "max", "minimum": "min", "and": "and", "or": "or", "xor": "xor"}
_ATOMIC_DTYPES = {
    "add": (*FLOATS, "s32", "u32", "s64", "u64"),
    **dict.fromkeys(("maximum", "minimum"), ("f32", "f64", "s32", "u32", "s64", "u64")),
    **dict.fromkeys(("and", "or", "xor"), ("s32", "u32", "s64", "u64")),
}


def apply(op: str, dtype: str, arguments: list[str]) -> str:
    """An elementwise operation.

    Args:
        op: its HLO name; not a conversion.
        dtype: of its operands; of `select`, of the values.
        arguments: the text of each operand.
    """
    kind, bits = REGISTER[dtype], BITS.get(dtype, 0)
    wide = max(bits, 32)
    return _cells(dtype)[op].format(
        *arguments,
        t=f"tl.{kind}",
        u=f"tl.uint{bits}",
        s=f"tl.int{bits}",
        n=bits,
        last=bits - 1,
        wide=f"tl.int{wide}",
        excess=wide - bits,
    )


def divided(text: str, dtype: str, divisor: float) -> str:
    """A float over a number that is known, rounded to the nearest; empty where that takes a division.

    The quotient of two numbers of 24 digits is further from the middle of two others than f64 is inexact.
    """
    if REGISTER[dtype] != "float32" or not math.isfinite(divisor) or not divisor:
        return ""
    mantissa, exponent = math.frexp(divisor)
    if abs(mantissa) == 0.5 and abs(exponent) < _FEW_EXPONENTS:
        return f"({text} * {1 / divisor!r})"
    return f"({text}.to(tl.float64) * {1 / divisor!r}).to(tl.float32)"


def has_cell(op: str, dtype: str) -> bool:
    """Whether there is an operation of a dtype."""
    return op in ("convert", "bitcast-convert") or op in _cells(dtype)


def _cells(dtype: str) -> dict[str, str]:
    if dtype == "pred":
        return PRED
    return {**ANY, **(INTEGER if dtype in BITS else DOUBLE if dtype == "f64" else FLOAT)}


def combine(op: str, dtype: str, a: str, b: str) -> str:
    """Two values of a reduction as one; values of pred are `int32` while they are combined."""
    if dtype == "pred":
        return f"{_COMBINE_PRED.get(op, COMBINE[op])}({a}, {b})"
    return f"{COMBINE[op]}({a}, {b})"


def reduce(op: str, dtype: str, text: str, axis: int) -> str:
    """A tile combined along an axis, as it was accumulated."""
    function = _COMBINE_PRED.get(op, COMBINE[op]) if dtype == "pred" else COMBINE[op]
    return f"tl.reduce({text}, {axis}, {function}, keep_dims=True)"


def accumulator_type(dtype: str) -> str:
    return "int32" if dtype == "pred" else REGISTER[dtype]


def atomic(op: str, dtype: str, pointer: str, value: str, mask: str, shape: Sequence[int]) -> str:
    """A value combined with one in memory; nothing that a kernel reads or writes has an order by that.

    Args:
        op: how.
        dtype: of both.
        pointer: where.
        value: as it is in memory.
        mask: where it happens; empty for everywhere.
        shape: of the three.
    """
    if op not in ("maximum", "minimum") or dtype in BITS:
        where = f", mask={mask}" if mask else ""
        return f'tl.atomic_{ATOMIC[op]}({pointer}, {value}{where}, sem="relaxed")'
    bits = 64 if dtype == "f64" else 32
    casts = [f"{pointer}.to(tl.pointer_type(tl.{kind}{bits}), bitcast=True)" for kind in ("int", "uint")]
    nan = (1 << (bits - 1)) - 1 if op == "maximum" else -1
    everywhere = f"tl.full({list(shape)}, 1, tl.int1)"
    given = ", ".join([pointer, *casts, value, mask or everywhere, str(nan)])
    return f"atomic_float_{op}({given})"


def has_atomic(op: str, dtype: str) -> bool:
    """Whether the device combines a value with one in memory in one step."""
    return dtype in _ATOMIC_DTYPES.get(op, ())

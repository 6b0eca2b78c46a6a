"""The LLVM code of every elementwise operation and reduction, by the names of `kernels/operations.py`.

Maxima and minima of floats by IEEE 754-2019: NaN if either is NaN, and 0 is larger than -0.

An instruction of AVX-512 orders zeros and leaves NaN out; others see to NaN, in a reduction beside the chain
from one element to the next.  LLVM knows how other targets do it: NEON has the operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mpmd.compile.backends.native_cpu.math import elementary
from mpmd.compile.backends.native_cpu.storage import (
    MEMORY,
    REGISTER,
    narrow,
    narrowed,
    round_to,
    to_odd,
    widen,
    widened,
)
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.kernels.operations import FLOATS, NARROW, NARROW_FLOATS, UNSIGNED
from mpmd.compile.kernels.precision import EXACT
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.llvm_types import (
    Value,
    bits_of,
    constant,
    is_float,
    lanes_of,
    suffix,
    vector,
    with_element,
)

_RANGE = {"maximum": 0b0101, "minimum": 0b0100}  # of both, the larger or smaller one with its own sign
_FLOATS = "<16 x float>"


def extreme(f: FunctionBuilder, op: str, a: Value, b: Value) -> Value:
    """`maximum` or `minimum` of two floats."""
    known = not (a.text.startswith("%") and b.text.startswith("%"))  # LLVM sees what a constant is not
    if known or not leaves_nan_out(f, op, a.type):
        return f.maximum(a, b) if op == "maximum" else f.minimum(a, b)
    return f.select(f.compare("uno", a, b), f.add(a, b), extreme_number(f, op, a, b))


def leaves_nan_out(f: FunctionBuilder, op: str, type_: str) -> bool:
    """Whether there is an `extreme_number` of that type."""
    return op in _RANGE and type_ == _FLOATS and f.target.vector_bytes == 64


def extreme_number(f: FunctionBuilder, op: str, a: Value, b: Value) -> Value:
    """`maximum` or `minimum` of two registers; where one is NaN, the other."""
    name, which = "llvm.x86.avx512.mask.range.ps.512", Value(str(_RANGE[op]), "i32")
    every_lane, no_exceptions = Value("-1", "i16"), Value("8", "i32")
    return f.intrinsic(name, a.type, a, b, which, a, every_lane, no_exceptions)


def no_nan(type_: str) -> Value:
    """The mask, of lanes of a type, of the NaN among no values."""
    return constant(0, vector("i1", lanes_of(type_)))


def nan_among(f: FunctionBuilder, mask: Value, values: list[Value]) -> Value:
    """The mask of NaN seen so far, with those in more registers: two are compared at once."""
    assert all(is_float(value.type) for value in values)
    for a, b in zip(values[::2], [*values[1::2], values[-1]]):
        mask = f.or_(mask, f.compare("uno", a, b))
    return mask


def with_nan(f: FunctionBuilder, mask: Value, total: Value) -> Value:
    """A scalar, or NaN if there was any."""
    return f.select(f.any_lane(mask), constant(math.nan, total.type), total)


Emitter = Callable[[FunctionBuilder, Sequence[Value], str], Value]


def emit_operation(
    f: FunctionBuilder, op: str, args: Sequence[Value], arg_dtypes: Sequence[str], dtype: str
) -> Value:
    """An elementwise operation on register values.

    Args:
        f: the function under construction.
        op: its HLO name.
        args: operands as register values, all of the same lanes.
        arg_dtypes: their dtypes.
        dtype: the result's dtype.
    """
    if op == "convert":
        return _convert(f, args[0], arg_dtypes[0], dtype)
    if op == "bitcast-convert":
        return _reinterpret(f, args[0], arg_dtypes[0], dtype)
    result = EMITTERS[op](f, args, arg_dtypes[-1])
    return result if op in EXACT else round_to(f, result, dtype)


def emit_combine(f: FunctionBuilder, op: str, a: Value, b: Value, dtype: str) -> Value:
    return EMITTERS[op](f, (a, b), dtype)


# -- arithmetic ---------------------------------------------------------------------------------------------
def _integer_or_float(integer: str, float_: str) -> Emitter:
    def emit(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
        return f.binary(float_ if is_float(args[0].type) else integer, args[0], args[1])

    return emit


def _add(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    return f.or_(*args) if dtype == "pred" else f.add(args[0], args[1])


def _multiply(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    return f.and_(*args) if dtype == "pred" else f.mul(args[0], args[1])


def _divide(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    a, b = args
    if is_float(a.type):
        return f.div(a, b)
    by_zero = f.compare("eq", b, constant(0, b.type))
    quotient = f.binary("udiv" if dtype in UNSIGNED else "sdiv", a, _safe_divisor(f, a, b, dtype))
    if dtype not in UNSIGNED:
        quotient = f.select(f.compare("eq", b, constant(-1, b.type)), f.neg(a), quotient)
    return f.select(by_zero, constant(-1, a.type), quotient)


def _remainder(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    a, b = args
    if is_float(a.type):
        return f.binary("frem", a, b)
    by_zero = f.compare("eq", b, constant(0, b.type))
    rest = f.binary("urem" if dtype in UNSIGNED else "srem", a, _safe_divisor(f, a, b, dtype))
    if dtype not in UNSIGNED:
        rest = f.select(f.compare("eq", b, constant(-1, b.type)), constant(0, a.type), rest)
    return f.select(by_zero, a, rest)


def _safe_divisor(f: FunctionBuilder, a: Value, b: Value, dtype: str) -> Value:
    """A divisor that cannot trap: zero, and -1 of signed integers, become 1."""
    one = constant(1, b.type)
    safe = f.select(f.compare("eq", b, constant(0, b.type)), one, b)
    return safe if dtype in UNSIGNED else f.select(f.compare("eq", b, constant(-1, b.type)), one, safe)


def _maximum(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    if is_float(args[0].type):
        return extreme(f, "maximum", *args)
    return f.select(_less(f, args[1], args[0], dtype), args[0], args[1])


def _minimum(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    if is_float(args[0].type):
        return extreme(f, "minimum", *args)
    return f.select(_less(f, args[0], args[1], dtype), args[0], args[1])


def _less(f: FunctionBuilder, a: Value, b: Value, dtype: str) -> Value:
    return f.compare("ult" if dtype in UNSIGNED or dtype == "pred" else "slt", a, b)


def _power(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    a, b = args
    if is_float(a.type):
        return elementary.BINARY["pow"](f, a, b)
    one, zero = constant(1, a.type), constant(0, a.type)
    result, base = one, a
    for bit in range(bits_of(a.type)):  # square and multiply
        used = f.compare("ne", f.and_(f.lshr(b, bit) if bit else b, one), zero)
        result = f.select(used, f.mul(result, base), result)
        base = f.mul(base, base)
    if dtype in UNSIGNED:
        return result
    odd = f.compare("ne", f.and_(b, one), zero)
    minus = constant(-1, a.type)
    small = f.select(f.compare("eq", a, minus), f.select(odd, minus, one), zero)
    small = f.select(f.compare("eq", a, one), one, small)
    return f.select(f.compare("slt", b, zero), small, result)


def _negate(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    return f.neg(args[0])


def _abs(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    a = args[0]
    if is_float(a.type):
        return f.fabs(a)
    return f.select(f.compare("slt", a, constant(0, a.type)), f.neg(a), a)


def _sign(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    a = args[0]
    zero, one = constant(0, a.type), constant(1, a.type)
    if is_float(a.type):
        return f.select(f.compare("ueq", a, zero), a, f.copysign(one, a))
    signed = f.select(f.compare("slt", a, zero), constant(-1, a.type), one)
    return f.select(f.compare("eq", a, zero), zero, signed)


def _intrinsic(name: str) -> Emitter:
    def emit(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
        return f.float_intrinsic(name, args[0])

    return emit


def _nearest_away(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    a = args[0]
    below_half = 0.49999999999999994 if bits_of(a.type) == 64 else 0.49999997
    moved = f.add(f.fabs(a), constant(below_half, a.type))
    return f.copysign(f.float_intrinsic("trunc", moved), a)


def _is_finite(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    return f.compare("olt", f.fabs(args[0]), constant(math.inf, args[0].type))


def _unary(name: str) -> Emitter:
    def emit(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
        return elementary.UNARY[name](f, args[0])

    return emit


def _atan2(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    return elementary.BINARY["atan2"](f, args[0], args[1])


# -- bits ---------------------------------------------------------------------------------------------------
def _not(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    return f.not_(args[0])


def _shift(opcode: str) -> Emitter:
    """A shift by the width or more gives zeros, or copies of the sign."""

    def emit(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
        a, amount = args
        width = bits_of(a.type)
        inside = f.compare("ult", amount, constant(width, a.type))
        most = constant(width - 1 if opcode == "ashr" else 0, a.type)
        shifted = f.binary(opcode, a, f.select(inside, amount, most))
        return shifted if opcode == "ashr" else f.select(inside, shifted, constant(0, a.type))

    return emit


def _popcnt(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    return f.float_intrinsic("ctpop", args[0])


def _leading_zeros(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    a = args[0]
    return f.intrinsic(f"llvm.ctlz.{suffix(a.type)}", a.type, a, constant(0, "i1"))


# -- choice -------------------------------------------------------------------------------------------------
def _clamp(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    low, x, high = args
    return _minimum(f, (_maximum(f, (x, low), dtype), high), dtype)


def _select(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
    return f.select(args[0], args[1], args[2])


def _compare(direction: str) -> Emitter:
    def emit(f: FunctionBuilder, args: Sequence[Value], dtype: str) -> Value:
        if dtype in FLOATS:
            predicate = "une" if direction == "ne" else "o" + direction
        elif direction in ("eq", "ne"):
            predicate = direction
        else:
            predicate = ("u" if dtype in UNSIGNED or dtype == "pred" else "s") + direction
        return f.compare(predicate, args[0], args[1])

    return emit


# -- conversions --------------------------------------------------------------------------------------------
def _convert(f: FunctionBuilder, a: Value, source: str, dtype: str) -> Value:
    if source in NARROW:
        a, source = widened(f, a, source)
    if dtype in NARROW:
        return _to_narrow(f, a, source, dtype)
    type_ = with_element(a.type, REGISTER[dtype])
    if dtype == "pred":
        return f.compare("une" if source in FLOATS else "ne", a, constant(0, a.type))
    if dtype in FLOATS:
        if source in FLOATS:
            wider = bits_of(type_) > bits_of(a.type)
            value = f.cast("fpext" if wider else "fptrunc", a, type_)
        else:
            value = f.cast("uitofp" if source in UNSIGNED or source == "pred" else "sitofp", a, type_)
        return round_to(f, value, dtype)
    if source in FLOATS:
        return _bounded(f, a, dtype)
    if bits_of(type_) <= bits_of(a.type):
        return f.cast("trunc", a, type_)
    return f.cast("zext" if source in UNSIGNED or source == "pred" else "sext", a, type_)


def _to_narrow(f: FunctionBuilder, a: Value, source: str, dtype: str) -> Value:
    """Bytes of a narrow type, rounded once; integers wrap, floats that do not fit give the nearest one."""
    if dtype in NARROW_FLOATS:
        # of all narrow floats only powers of two go beyond what f32 counts exactly
        if dtype == "f8e8m0fnu" and source not in FLOATS and bits_of(a.type) > 16:
            a, source = _convert(f, a, source, "f64"), "f64"
        return narrowed(f, to_odd(f, a) if source == "f64" else _convert(f, a, source, "f32"), dtype)
    whole = _bounded(f, a, dtype) if source in FLOATS else _convert(f, a, source, "s8")
    return narrowed(f, whole, dtype)


def _bounded(f: FunctionBuilder, a: Value, dtype: str) -> Value:
    """Floats as integers: towards zero, out of range to the nearest bound of `dtype`, NaN to zero.

    Bounds are taken of the floats, as LLVM's saturating conversion of vectors works lane by lane.
    """
    low, high = integer_range(dtype)
    exact = (1 << (53 if bits_of(a.type) == 64 else 24)) - 1
    top = high if high <= exact else high - high // (exact + 1)  # the last float that fits
    number = f.select(f.compare("uno", a, a), constant(0.0, a.type), a)
    above = f.larger_number(number, constant(float(low), a.type))
    kept = f.smaller_number(above, constant(float(top), a.type))
    width = max(32, DTYPES[dtype].bits)
    unsigned = low == 0 and DTYPES[dtype].bits >= 32
    whole = f.cast("fptoui" if unsigned else "fptosi", kept, with_element(a.type, f"i{width}"))
    if top != high:
        beyond = f.compare("oge", a, constant(float(high + 1), a.type))
        whole = f.select(beyond, constant(high, whole.type), whole)
    return f.cast("trunc", whole, with_element(a.type, MEMORY[dtype]))


def _reinterpret(f: FunctionBuilder, a: Value, source: str, dtype: str) -> Value:
    raw = narrow(f, a, source)
    return widen(f, f.cast("bitcast", raw, with_element(a.type, MEMORY[dtype])), dtype)


EMITTERS: dict[str, Emitter] = {
    "abs": _abs,
    "add": _add,
    "and": _integer_or_float("and", "and"),
    "atan2": _atan2,
    "cbrt": _unary("cbrt"),
    "ceil": _intrinsic("ceil"),
    "clamp": _clamp,
    **{f"compare-{d}": _compare(d) for d in ("eq", "ne", "lt", "le", "gt", "ge")},
    "cosine": _unary("cos"),
    "count-leading-zeros": _leading_zeros,
    "divide": _divide,
    "erf": _unary("erf"),
    "exponential": _unary("exp"),
    "exponential-minus-one": _unary("expm1"),
    "floor": _intrinsic("floor"),
    "is-finite": _is_finite,
    "log": _unary("log"),
    "log-plus-one": _unary("log1p"),
    "logistic": _unary("logistic"),
    "maximum": _maximum,
    "minimum": _minimum,
    "multiply": _multiply,
    "negate": _negate,
    "not": _not,
    "or": _integer_or_float("or", "or"),
    "popcnt": _popcnt,
    "power": _power,
    "remainder": _remainder,
    "round-nearest-afz": _nearest_away,
    "round-nearest-even": _intrinsic("roundeven"),
    "rsqrt": _unary("rsqrt"),
    "select": _select,
    "shift-left": _shift("shl"),
    "shift-right-arithmetic": _shift("ashr"),
    "shift-right-logical": _shift("lshr"),
    "sign": _sign,
    "sine": _unary("sin"),
    "sqrt": _unary("sqrt"),
    "subtract": _integer_or_float("sub", "fsub"),
    "tan": _unary("tan"),
    "tanh": _unary("tanh"),
    "xor": _integer_or_float("xor", "xor"),
}

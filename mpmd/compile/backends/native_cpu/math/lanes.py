"""Shared parts of the elementary functions: polynomials, powers of two, rounding, calls of libm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.llvm_types import Value, bits_of, constant, element_of, integer_type, lanes_of

MANTISSA_BITS = {"float": 23, "double": 52}
EXPONENT_BIAS = {"float": 127, "double": 1023}
_REGISTER = 16  # floats of AVX-512


def like(x: Value, value: float) -> Value:
    return constant(value, x.type)


def polynomial(b: FunctionBuilder, x: Value, coefficients: Sequence[float]) -> Value:
    """c[0] + c[1] x + c[2] x² ..., by Horner's rule with one fused multiply-add per step."""
    result = like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = b.fma(result, x, like(x, coefficient))
    return result


def clamp_keeping_nan(b: FunctionBuilder, x: Value, low: float, high: float) -> Value:
    return b.larger_number(like(x, low), b.smaller_number(like(x, high), x))


def small_as_itself(b: FunctionBuilder, x: Value, result: Value) -> Value:
    """The result of an odd function of slope one, or x where it is zero: of both signs, and denormal.

    Threads of XLA flush denormals wherever they compute with them, and compare them as equal to zero.
    """
    return b.select(b.compare("oeq", x, like(x, 0.0)), x, result)


def nearest_integer(b: FunctionBuilder, x: Value, factor: float = 1.0) -> tuple[Value, Value]:
    """The integer nearest to x·factor, as a float and as an integer of the same width.

    For |x·factor| < 2^(mantissa bits - 2).  Adding 1.5·2^m pushes the fraction out of the mantissa and leaves
    the integer in its low bits.
    """
    shift = like(x, 1.5 * 2.0 ** MANTISSA_BITS[element_of(x.type)])
    moved = b.add(x, shift) if factor == 1.0 else b.fma(x, like(x, factor), shift)
    return b.sub(moved, shift), b.sub(b.as_bits(moved), b.as_bits(shift))


def power_of_two(b: FunctionBuilder, n: Value, element: str) -> Value:
    """2^n for an integer n whose power is a normal number."""
    biased = b.add(n, constant(EXPONENT_BIAS[element], n.type))
    return b.from_bits(b.shl(biased, MANTISSA_BITS[element]), element)


def has_tables(b: FunctionBuilder) -> bool:
    """Whether a register is a table of 16 floats and floats are scaled at once (AVX-512)."""
    return b.target.vector_bytes == 64


def by_registers(b: FunctionBuilder, x: Value, function: Callable[[FunctionBuilder, Value], Value]) -> Value:
    """A function of 16 floats for up to as many lanes: scalars get the numbers that vectors get."""
    lanes = lanes_of(x.type)
    if lanes == 1:
        return b.extract(function(b, b.splat(x, _REGISTER)), 0)
    if lanes == _REGISTER:
        return function(b, x)
    if lanes < _REGISTER:
        wide = function(b, b.shuffle(x, x, [lane % lanes for lane in range(_REGISTER)]))
        return b.shuffle(wide, wide, range(lanes))
    half = lanes // 2
    low, high = (by_registers(b, b.shuffle(x, x, range(k, k + half)), function) for k in (0, half))
    return b.shuffle(low, high, range(lanes))


def scale_by_power_of_two(b: FunctionBuilder, x: Value, n: Value) -> Value:
    """Times 2^n for an integer n, rounded once even if the result is denormal or overflows."""
    element = element_of(x.type)
    half = b.ashr(n, 1)
    first = power_of_two(b, half, element)
    return b.mul(b.mul(x, first), power_of_two(b, b.sub(n, half), element))


def scale_at_once(b: FunctionBuilder, x: Value, power: Value) -> Value:
    """Times 2^n for the floor n of a float, rounded once (AVX-512)."""
    name, mask = "llvm.x86.avx512.mask.scalef.ps.512", Value("-1", "i16")
    current_rounding = Value("4", "i32")
    return b.intrinsic(name, x.type, x, power, x, mask, current_rounding)


def split_exponent(b: FunctionBuilder, x: Value) -> tuple[Value, Value]:
    """(n, m) with x = 2^n · m and m in [sqrt(1/2), sqrt(2)), n a float; for normal positive x."""
    element = element_of(x.type)
    mantissa = MANTISSA_BITS[element]
    root_half = {"float": 0x3F3504F3, "double": 0x3FE6A09E667F3BCD}[element]
    offset = constant(root_half, integer_type(x.type))
    distance = b.sub(b.as_bits(x), offset)
    kept = b.and_(distance, constant((1 << mantissa) - 1, offset.type))
    number = b.cast("sitofp", b.ashr(distance, mantissa), x.type)
    return number, b.from_bits(b.add(kept, offset), element)


def nearer_to_zero(b: FunctionBuilder, x: Value, limit: float) -> Value:
    """The one of x and a limit that is nearer to zero, with the sign of x; the limit for NaN (AVX-512)."""
    name, smaller_magnitude = "llvm.x86.avx512.mask.range.ps.512", Value("2", "i32")
    every_lane, no_exceptions = Value("-1", "i16"), Value("8", "i32")
    return b.intrinsic(name, x.type, x, like(x, limit), smaller_magnitude, x, every_lane, no_exceptions)


def pick_lanes(b: FunctionBuilder, table: Value, places: Value) -> Value:
    """The lane of a table of 16 floats that the low four bits of each place number (AVX-512)."""
    return b.intrinsic("llvm.x86.avx512.permvar.sf.512", table.type, table, places)


def call_each_lane(b: FunctionBuilder, name: str, *arguments: Value) -> Value:
    """A libm function on every lane; `name` is the double's, the float's has an f at its end."""
    type_ = arguments[0].type
    element = element_of(type_)
    symbol = name if bits_of(type_) == 64 else name + "f"
    results = []
    for lane in range(lanes_of(type_)):
        scalars = [b.extract(a, lane) for a in arguments]
        result = b.call(symbol, *scalars, result=element)
        assert result is not None
        results.append(result)
    return b.assemble(results) if lanes_of(type_) > 1 else results[0]

"""pow, and the roots.

pow of floats is 2^(y·log2|x|) in double precision, so that one rounding remains: to the result.
"""

from __future__ import annotations

import math

from mpmd.compile.backends.native_cpu.math.lanes import (
    MANTISSA_BITS,
    call_each_lane,
    clamp_keeping_nan,
    like,
    nearest_integer,
    polynomial,
    power_of_two,
    split_exponent,
)
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.types import Value, constant, element_of, with_element

# log2(m) = s·P(s²) with s = (m - 1)/(m + 1): the series of 2·artanh(s)/log(2), next term 2^-44 of the first
_LOG2 = tuple(2 / math.log(2) / (2 * k + 1) for k in range(8))
# 2^r on |r| ≤ 1/2: the series of e^(r·log(2)), next term 2^-41
_EXP2 = tuple(math.log(2) ** k / math.factorial(k) for k in range(11))


def sqrt(b: FunctionBuilder, x: Value) -> Value:
    """The square root, correctly rounded; NaN below -0."""
    return b.sqrt(x)


def rsqrt(b: FunctionBuilder, x: Value) -> Value:
    """1 / sqrt(x)."""
    return b.div(like(x, 1.0), b.sqrt(x))


def pow(b: FunctionBuilder, x: Value, y: Value) -> Value:
    """The power x^y with the edges of C99: x^0 and 1^y are 1 even for NaN."""
    if element_of(x.type) == "double":
        return call_each_lane(b, "pow", x, y)
    one, zero, infinity = like(x, 1.0), like(x, 0.0), like(x, math.inf)
    size, raised = _lifted(b, b.fabs(x))
    y_is_zero = b.compare("eq", b.as_bits(b.fabs(y)), constant(0, b.as_bits(y).type))
    y = _at_least_normal(b, y)
    # the missing part of the logarithm of a normal number: added in double precision, chosen in single
    raised = b.select(b.compare("oeq", size, zero), like(x, -math.inf), raised)
    raised = b.select(b.compare("oeq", size, infinity), size, raised)
    raised = b.select(b.compare("uno", x, x), x, raised)
    wide = with_element(x.type, "double")
    logarithm = b.add(_log2(b, b.cast("fpext", size, wide)), b.cast("fpext", raised, wide))
    exponent = b.mul(b.cast("fpext", y, wide), logarithm)
    result = b.cast("fptrunc", _exp2(b, exponent), x.type)

    whole = b.compare("oeq", b.float_intrinsic("trunc", y), y)  # infinities count as even integers
    negative = b.compare("slt", b.as_bits(x), constant(0, b.as_bits(x).type))
    flipped = b.select(b.and_(negative, _is_odd(b, y)), b.neg(result), result)
    undefined = b.and_(b.and_(negative, b.compare("ogt", size, zero)), b.not_(whole))
    undefined = b.and_(undefined, b.compare("olt", size, infinity))
    result = b.select(undefined, like(x, math.nan), flipped)
    # |x| = 1 and y infinite: 0·∞ above, one by definition
    far = b.and_(b.compare("oeq", b.fabs(x), one), b.compare("oeq", b.fabs(y), infinity))
    always = b.or_(b.or_(b.compare("oeq", x, one), y_is_zero), far)
    return b.select(always, one, result)


def cbrt(b: FunctionBuilder, x: Value) -> Value:
    return call_each_lane(b, "cbrt", x)


def _is_odd(b: FunctionBuilder, y: Value) -> Value:
    """Whether a float is an odd integer: half of it is not an integer, itself is."""
    half = b.mul(y, like(y, 0.5))
    whole = b.compare("oeq", b.float_intrinsic("trunc", y), y)
    return b.and_(whole, b.compare("une", b.float_intrinsic("trunc", half), half))


def _lifted(b: FunctionBuilder, size: Value) -> tuple[Value, Value]:
    """(f, n) with size = f · 2^n and f normal, for a size of at least zero.

    By integers alone: for a thread that flushes denormals they are zero wherever they are floats.
    """
    bits = b.as_bits(size)
    small = b.compare("ult", bits, constant(1 << MANTISSA_BITS["float"], bits.type))
    lifted = b.select(small, b.cast("sitofp", bits, size.type), size)
    return lifted, b.select(small, like(size, -149.0), like(size, 0.0))


def _at_least_normal(b: FunctionBuilder, y: Value) -> Value:
    """Denormals and zeros as the smallest normal numbers of their sign: powers by them are the same."""
    bits = b.as_bits(y)
    size = b.as_bits(b.fabs(y))
    least = constant(1 << MANTISSA_BITS["float"], bits.type)
    larger = b.select(b.compare("ult", size, least), least, size)
    return b.from_bits(b.or_(larger, b.and_(bits, constant(-(1 << 31), bits.type))), "float")


def _log2(b: FunctionBuilder, x: Value) -> Value:
    """log2 of doubles that came from floats: never denormal; some finite number of zero, infinity and NaN."""
    n, m = split_exponent(b, x)
    s = b.div(b.sub(m, like(x, 1.0)), b.add(m, like(x, 1.0)))
    return b.fma(s, polynomial(b, b.mul(s, s), _LOG2), n)


def _exp2(b: FunctionBuilder, x: Value) -> Value:
    """2^x of doubles, limited to powers that a float distinguishes from zero and infinity."""
    x = clamp_keeping_nan(b, x, -200.0, 200.0)
    n_float, n = nearest_integer(b, x)
    return b.mul(polynomial(b, b.sub(x, n_float), _EXP2), power_of_two(b, n, "double"))

"""The elementary functions, by the names that kernels use.

pow: 2^(y·log2|x|) in double precision, so that one rounding remains, to the result.

exp, expm1, logistic: x = n·log(2) + r with |r| ≤ log(2)/2, the multiple taken off in two parts by fused
multiply-adds (Cody and Waite); a minimax polynomial for the rest; 2^n put into the exponent.  Where a
register of 16 floats is a table (AVX-512), n counts sixteenths: the polynomial is shorter by three terms, and
one lookup and one multiply-add put the sixteenths' power of two in.

log, log1p: the argument is 2^n·m with m in [sqrt(1/2), sqrt(2)); with f = m - 1, log(m) = f - f²/2 + f³·P(f),
P minimax.

sin, cos: x = n·(π/2) + r with |r| ≤ π/4, π/2 taken off in three parts by fused multiply-adds, which is enough
up to 71,000; vectors with a larger lane call libm for it.  The quadrant n mod 4 picks polynomial and sign.

tanh, erf: x·P(x²)/Q(x²), eleven multiply-adds and a division, no exponential.  The fractions are minimax in
relative error up to where the function rounds to one.  Their error is far below one unit in the last place;
the bound of 6 comes from rounding numerator, denominator and quotient.  Arguments are limited to a number
whose rounded fraction is one or more: farther ones have exactly one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mpmd.compile.backends.native_cpu.math.lanes import (
    MANTISSA_BITS,
    by_registers,
    call_each_lane,
    clamp_keeping_nan,
    has_tables,
    like,
    nearer_to_zero,
    nearest_integer,
    pick_lanes,
    polynomial,
    power_of_two,
    scale_at_once,
    scale_by_power_of_two,
    small_as_itself,
    split_exponent,
)
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.llvm_types import Value, constant, element_of, lanes_of, vector_constant, with_element

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860676533018798e-06  # sum to log(2); the first has 15 bits

# (exp(r) - 1 - r) / r² on |r| ≤ log(2)/2: minimax, weighted for exp (error 2^-28.2 of exp(r)) ...
_EXP = (0.49999994, 0.166665211, 0.0416682735, 0.00836868584, 0.00138201355)
# ... the same on |r| ≤ log(2)/32 (error 2^-29.2) ...
_EXP_NEAR = (0.5000162, 0.16666918)
_STEPS = 16  # as many as lanes
_POWERS = [2.0 ** (k / _STEPS) for k in range(_STEPS)]
# ... and for exp - 1 (error 2^-31 of expm1(r))
_EXPM1 = (0.5, 0.166666672, 0.0416664891, 0.00833320804, 0.00139326858, 0.000199442555)


def _reduce(b: FunctionBuilder, x: Value) -> tuple[Value, Value]:
    """(n, r) with x = n·log(2) + r."""
    n_float, n = nearest_integer(b, x, _LOG2_E)
    r = b.fma(n_float, like(x, -_LN2_HIGH), x)
    return n, b.fma(n_float, like(x, -_LN2_LOW), r)


def exp(b: FunctionBuilder, x: Value) -> Value:
    """e^x: 0 below -104, infinity above 88.73, denormals between -103.97 and -87.34."""
    if element_of(x.type) == "double":
        return call_each_lane(b, "exp", x)
    if has_tables(b):
        return by_registers(b, x, _exp_by_table)
    n, r = _reduce(b, clamp_keeping_nan(b, x, -104.0, 89.0))
    tail = polynomial(b, r, _EXP)
    y = b.fma(b.mul(r, r), tail, r)
    return scale_by_power_of_two(b, b.add(y, like(x, 1.0)), n)


def _exp_by_table(b: FunctionBuilder, x: Value) -> Value:
    """e^x with x = t·log(2) + r, t a multiple of 1/16.

    Multiplications and other operations are balanced: seven of each.
    """
    shift = like(x, 1.5 * 2.0**23 / _STEPS)
    moved = b.fma(x, like(x, _LOG2_E), shift)
    t = b.sub(moved, shift)
    r = b.fma(t, like(x, -_LN2_LOW), b.fma(t, like(x, -_LN2_HIGH), x))
    # far from zero r is of any size, and NaN at infinity; in all cases 2^t decides
    r = nearer_to_zero(b, r, 1.0)
    rest = b.mul(r, polynomial(b, r, (1.0, *_EXP_NEAR)))
    power = pick_lanes(b, vector_constant(_POWERS, "float"), b.as_bits(moved))  # of the fraction of t
    return scale_at_once(b, b.fma(power, rest, power), t)


def expm1(b: FunctionBuilder, x: Value) -> Value:
    """e^x - 1 without cancellation near zero."""
    if element_of(x.type) == "double":
        return call_each_lane(b, "expm1", x)
    n, r = _reduce(b, clamp_keeping_nan(b, x, -26.0, 89.0))
    small = b.fma(b.mul(r, r), polynomial(b, r, _EXPM1), r)
    half = power_of_two(b, b.sub(n, constant(1, n.type)), "float")  # 2^n itself may overflow
    scaled = b.fma(half, small, b.sub(half, like(x, 0.5)))
    result = b.select(b.compare("eq", n, constant(0, n.type)), small, b.add(scaled, scaled))
    return small_as_itself(b, x, result)


def logistic(b: FunctionBuilder, x: Value) -> Value:
    """1 / (1 + e^-x), accurate on both sides: only e to a negative power is taken."""
    e = exp(b, b.neg(b.fabs(x)))
    one = like(x, 1.0)
    top = b.select(b.compare("olt", x, like(x, 0.0)), e, one)
    return b.div(top, b.add(e, one))


# error 2^-29.5 on |x| ≤ 9.02
_TANH_P = (0.999999999, 0.136799176, 0.0038683309, 2.80075223e-05, 3.05851723e-08, -1.22035728e-11)
_TANH_Q = (1.0, 0.470132496, 0.0272458503, 0.000393863667, 1.287371e-06)
_TANH_ONE = 9.0109215

# error 2^-25.6 on |x| ≤ 3.93
_ERF_P = (1.12837915, 0.190781836, 0.0527900354, 0.00377952867, 0.000284807596, 2.04199535e-06)
_ERF_Q = (1.0, 0.50240872, 0.11425671, 0.0149972737, 0.00116519481, 3.80042802e-05)
_ERF_ONE = 3.9192019


def tanh(b: FunctionBuilder, x: Value) -> Value:
    if element_of(x.type) == "double":
        return call_each_lane(b, "tanh", x)
    return small_as_itself(b, x, _odd_fraction(b, x, _TANH_P, _TANH_Q, _TANH_ONE))


def erf(b: FunctionBuilder, x: Value) -> Value:
    """The error function."""
    if element_of(x.type) == "double":
        return call_each_lane(b, "erf", x)
    return _odd_fraction(b, x, _ERF_P, _ERF_Q, _ERF_ONE)


def _odd_fraction(
    b: FunctionBuilder, x: Value, p: Sequence[float], q: Sequence[float], limit: float
) -> Value:
    near = clamp_keeping_nan(b, x, -limit, limit)
    square = b.mul(near, near)
    quotient = b.div(b.mul(near, polynomial(b, square, p)), polynomial(b, square, q))
    return clamp_keeping_nan(b, quotient, -1.0, 1.0)


_MIN_NORMAL = 2.0**-126

# (log(1 + f) - f + f²/2) / f³ on [sqrt(1/2) - 1, sqrt(2) - 1], error 2^-30.3 of log(1 + f)
_LOG = (
    0.333333135,
    -0.250000089,
    0.20002073,
    -0.166679963,
    0.142203271,
    -0.12406034,
    0.118835725,
    -0.116714232,
    0.0675089806,
)


def _log_of_parts(b: FunctionBuilder, n: Value, f: Value) -> Value:
    """n·log(2) + log(1 + f), the small terms added first."""
    square = b.mul(f, f)
    tail = b.mul(b.mul(square, f), polynomial(b, f, _LOG))
    tail = b.fma(n, like(f, _LN2_LOW), tail)
    tail = b.fma(square, like(f, -0.5), tail)
    return b.fma(n, like(f, _LN2_HIGH), b.add(f, tail))


def log(b: FunctionBuilder, x: Value) -> Value:
    if element_of(x.type) == "double":
        return call_each_lane(b, "log", x)
    tiny = b.compare("olt", x, like(x, _MIN_NORMAL))
    scaled = b.select(tiny, b.mul(x, like(x, 2.0**23)), x)
    n, m = split_exponent(b, scaled)
    n = b.sub(n, b.select(tiny, like(x, 23.0), like(x, 0.0)))
    result = _log_of_parts(b, n, b.sub(m, like(x, 1.0)))
    return _edges(b, result, x, like(x, 0.0))


def log1p(b: FunctionBuilder, x: Value) -> Value:
    """log(1 + x) without losing x when it is small: x is scaled on its own, beside the one."""
    if element_of(x.type) == "double":
        return call_each_lane(b, "log1p", x)
    one = like(x, 1.0)
    n, m = split_exponent(b, b.add(one, x))
    few = clamp_keeping_nan(b, b.neg(n), -24.0, 24.0)
    inverse = power_of_two(b, nearest_integer(b, few)[1], "float")
    together = b.fma(x, inverse, b.sub(inverse, one))
    far = b.compare("ogt", n, like(x, 8.0))  # 1 + x is as good as exact in proportion
    result = _log_of_parts(b, n, b.select(far, b.sub(m, one), together))
    return _edges(b, small_as_itself(b, x, result), x, like(x, -1.0))


def _edges(b: FunctionBuilder, result: Value, x: Value, pole: Value) -> Value:
    """-infinity at the pole, NaN below it and for NaN, infinity at infinity."""
    infinity = like(x, math.inf)
    result = b.select(b.compare("oeq", x, pole), like(x, -math.inf), result)
    result = b.select(b.compare("oeq", x, infinity), infinity, result)
    return b.select(b.compare("uge", x, pole), b.select(b.compare("uno", x, x), x, result), like(x, math.nan))


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


_HALF_PI = (1.57079637050628662109375, -4.37113900018624283e-8, -1.71512451000249e-15)
_MAX_REDUCED = 71000.0

_SIN = (-0.166666552, 0.0083321901, -0.000195184082)  # (sin(r)/r - 1) / r², error 2^-28
_COS = (0.0416666456, -0.00138873013, 2.44306684e-05)  # (cos(r) - 1 + r²/2) / r⁴, error 2^-33


def sin(b: FunctionBuilder, x: Value) -> Value:
    return _sin_or_cos(b, x, "sin", 0)


def cos(b: FunctionBuilder, x: Value) -> Value:
    return _sin_or_cos(b, x, "cos", 1)


def _sin_or_cos(b: FunctionBuilder, x: Value, name: str, quarter: int) -> Value:
    if element_of(x.type) == "double":
        return call_each_lane(b, name, x)
    huge = b.compare("ogt", b.fabs(x), like(x, _MAX_REDUCED))
    near = _reduced(b, b.select(huge, like(x, 0.0), x), quarter)
    if lanes_of(x.type) == 1:
        with b.branch_value(huge, near) as branch:
            branch.value = call_each_lane(b, name, x)
        return branch.result()
    with b.branch_value(b.any_lane(huge), near) as branch:
        branch.value = b.select(huge, call_each_lane(b, name, x), near)
    return branch.result()


def _reduced(b: FunctionBuilder, x: Value, quarter: int) -> Value:
    """The sine of x + quarter·π/2 for |x| up to `_MAX_REDUCED`."""
    n_float, n = nearest_integer(b, x, 2 / math.pi)
    r = x
    for part in _HALF_PI:
        r = b.fma(n_float, like(x, -part), r)
    square = b.mul(r, r)
    sine = b.fma(b.mul(square, r), polynomial(b, square, _SIN), r)
    cosine = b.fma(square, like(x, -0.5), like(x, 1.0))
    cosine = b.fma(b.mul(square, square), polynomial(b, square, _COS), cosine)
    n = b.add(n, constant(quarter, n.type)) if quarter else n
    odd = b.compare("ne", b.and_(n, constant(1, n.type)), constant(0, n.type))
    # bit 1 of the quadrant is the sign
    sign = b.shl(b.and_(n, constant(2, n.type)), 30)
    result = b.from_bits(b.xor(b.as_bits(b.select(odd, cosine, sine)), sign), "float")
    return result if quarter else small_as_itself(b, x, result)


def tan(b: FunctionBuilder, x: Value) -> Value:
    return call_each_lane(b, "tan", x)


def atan2(b: FunctionBuilder, y: Value, x: Value) -> Value:
    return call_each_lane(b, "atan2", y, x)


UNARY: dict[str, Callable[[FunctionBuilder, Value], Value]] = {
    "cbrt": cbrt,
    "cos": cos,
    "erf": erf,
    "exp": exp,
    "expm1": expm1,
    "log": log,
    "log1p": log1p,
    "logistic": logistic,
    "rsqrt": rsqrt,
    "sin": sin,
    "sqrt": sqrt,
    "tan": tan,
    "tanh": tanh,
}
BINARY: dict[str, Callable[[FunctionBuilder, Value, Value], Value]] = {"atan2": atan2, "pow": pow}

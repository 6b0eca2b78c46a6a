"""log and log1p.

The argument is 2^n·m with m in [sqrt(1/2), sqrt(2)); with f = m - 1, log(m) = f - f²/2 + f³·P(f), P minimax.
"""

from __future__ import annotations

import math

from mpmd.compile.backends.native_cpu.math.lanes import (
    call_each_lane,
    clamp_keeping_nan,
    like,
    nearest_integer,
    polynomial,
    power_of_two,
    small_as_itself,
    split_exponent,
)
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.types import Value, element_of

_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860676533018798e-06
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

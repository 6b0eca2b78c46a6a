"""exp, expm1 and the logistic function.

x = n·log(2) + r with |r| ≤ log(2)/2, the multiple taken off in two parts by fused multiply-adds (Cody and
Waite); a minimax polynomial for the rest; 2^n put into the exponent.
"""

from __future__ import annotations

from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant, element_of
from mpmd.compile.backends.native_cpu.math.lanes import (
    call_each_lane,
    clamp_keeping_nan,
    like,
    nearer_to_zero,
    nearest_integer,
    polynomial,
    power_of_two,
    scale_by_power_of_two,
    scales_at_once,
)

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860676533018798e-06  # sum to log(2); the first has 15 bits

# (exp(r) - 1 - r) / r² on |r| ≤ log(2)/2: minimax, weighted for exp (error 2^-28.2 of exp(r)) ...
_EXP = (0.49999994, 0.166665211, 0.0416682735, 0.00836868584, 0.00138201355)
# ... and for exp - 1 (error 2^-31 of expm1(r))
_EXPM1 = (0.5, 0.166666672, 0.0416664891, 0.00833320804, 0.00139326858, 0.000199442555)


def _reduce(b: FunctionBuilder, x: Value) -> tuple[Value, Value, Value]:
    """(n as a float, n as an integer, r) with x = n·log(2) + r."""
    n_float, n = nearest_integer(b, b.mul(x, like(x, _LOG2_E)))
    r = b.fma(n_float, like(x, -_LN2_HIGH), x)
    return n_float, n, b.fma(n_float, like(x, -_LN2_LOW), r)


def exp(b: FunctionBuilder, x: Value) -> Value:
    """e^x: 0 below -104, infinity above 88.73, denormals between -103.97 and -87.34."""
    if element_of(x.type) == "double":
        return call_each_lane(b, "exp", x)
    if scales_at_once(b, x):
        # far from zero r is of any size, and NaN at infinity; whatever it is taken for, 2^n decides
        n_float, n, r = _reduce(b, x)
        y = polynomial(b, nearer_to_zero(b, r, 1.0), (1.0, 1.0, *_EXP))
        return scale_by_power_of_two(b, y, n, n_float)
    n_float, n, r = _reduce(b, clamp_keeping_nan(b, x, -104.0, 89.0))
    tail = polynomial(b, r, _EXP)
    y = b.fma(b.mul(r, r), tail, r)
    return scale_by_power_of_two(b, b.add(y, like(x, 1.0)), n, n_float)


def expm1(b: FunctionBuilder, x: Value) -> Value:
    """e^x - 1 without cancellation near zero."""
    if element_of(x.type) == "double":
        return call_each_lane(b, "expm1", x)
    _, n, r = _reduce(b, clamp_keeping_nan(b, x, -26.0, 89.0))
    small = b.fma(b.mul(r, r), polynomial(b, r, _EXPM1), r)
    half = power_of_two(b, b.sub(n, constant(1, n.type)), "float")  # 2^n itself may overflow
    scaled = b.fma(half, small, b.sub(half, like(x, 0.5)))
    result = b.select(b.compare("eq", n, constant(0, n.type)), small, b.add(scaled, scaled))
    return b.copysign(result, x)  # expm1(-0) is -0


def logistic(b: FunctionBuilder, x: Value) -> Value:
    """1 / (1 + e^-x), accurate on both sides: only e to a negative power is taken."""
    e = exp(b, b.neg(b.fabs(x)))
    one = like(x, 1.0)
    top = b.select(b.compare("olt", x, like(x, 0.0)), e, one)
    return b.div(top, b.add(e, one))

"""exp, expm1 and the logistic function.

x = n·log(2) + r with |r| ≤ log(2)/2, the multiple taken off in two parts by fused multiply-adds (Cody and
Waite); a minimax polynomial for the rest; 2^n put into the exponent.

Where a register of 16 floats is a table (AVX-512), n counts sixteenths: the polynomial is shorter by three
terms, and one lookup and one multiply-add put the sixteenths' power of two in.
"""

from __future__ import annotations

from mpmd.compile.backends.native_cpu.math.lanes import (
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
)
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.llvm_types import Value, constant, element_of, vector_constant

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

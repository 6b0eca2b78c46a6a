"""tanh and erf as x·P(x²)/Q(x²): eleven multiply-adds and a division, no exponential.

The fractions are minimax in relative error up to where the function rounds to one.  Their error is far below
one unit in the last place; the bound of 6 comes from rounding numerator, denominator and quotient.  Arguments
are limited to a number of which the rounded fraction is one or more: farther ones have exactly one.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.backends.native_cpu.math.lanes import (
    call_each_lane,
    clamp_keeping_nan,
    polynomial,
    small_as_itself,
)
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.types import Value, element_of

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

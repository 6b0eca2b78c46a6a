"""sin and cos.

x = n·(π/2) + r with |r| ≤ π/4, π/2 taken off in three parts by fused multiply-adds, which is enough up to
71,000; vectors with a larger lane call libm for it.  The quadrant n mod 4 picks the polynomial and the sign.
"""

from __future__ import annotations

import math

from mpmd.compile.backends.native_cpu.math.lanes import (
    call_each_lane,
    like,
    nearest_integer,
    polynomial,
    small_as_itself,
)
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.types import Value, constant, element_of, lanes_of

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

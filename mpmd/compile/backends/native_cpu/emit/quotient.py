"""Vectors divided by one number: by its inverse, and corrected to the very quotient.

A core multiplies several vectors in the time of one division.  With r the inverse of s, rounded, and
q = a·r, the rest a - q·s is exact and q + rest·r is the correctly rounded quotient, unless something is too
large or too small on the way.  So a number of ordinary size is inverted once; by others is divided.

Source: P. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant

_SMALLEST, _LARGEST = 2.0**-14, 2.0**100
_BEYOND_RESTS = 2.0**110  # of finite quotients; times the largest inverse it is finite


@dataclass(frozen=True)
class Inverse:
    """The inverse of a number, in every lane.

    Attributes:
        value: the inverse.
        ordinary: an `i1`: whether the number has the size for which it serves.
    """

    value: Value
    ordinary: Value


def invert(f: FunctionBuilder, divisor: Value, lanes: int) -> Inverse:
    """The inverse of a float, to divide vectors of `lanes` by it."""
    size = f.fabs(divisor)
    above = f.compare("oge", size, constant(_SMALLEST, "float"))
    below = f.compare("ole", size, constant(_LARGEST, "float"))
    inverse = f.div(constant(1.0, "float"), divisor)
    return Inverse(f.splat(inverse, lanes), f.and_(above, below))


def divide_by(f: FunctionBuilder, a: Value, divisor: Value, inverse: Inverse) -> Value:
    """A vector of floats divided by a number that stands in every lane of `divisor`."""
    quotient = f.mul(a, inverse.value)
    rest = f.fma(f.neg(quotient), divisor, a)
    # an infinite quotient has a rest that is NaN, and stays as it is with any other
    rest = f.smaller_number(rest, constant(_BEYOND_RESTS, rest.type))
    corrected = f.fma(rest, inverse.value, quotient)
    with f.branch_value(f.not_(inverse.ordinary), corrected) as branch:
        branch.value = f.div(a, divisor)
    return branch.result()

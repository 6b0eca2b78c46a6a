"""Maxima and minima of floats by IEEE 754-2019: NaN if either is NaN, and 0 is larger than -0.

An instruction of AVX-512 orders zeros and leaves NaN out; others see to NaN, in a reduction beside the chain
from one element to the next.  LLVM knows how other targets do it: NEON has the operation.
"""

from __future__ import annotations

import math

from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.llvm_types import Value, constant, is_float, lanes_of, vector

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


def nan_among(f: FunctionBuilder, found: Value, values: list[Value]) -> Value:
    """A mask of NaN found so far, and those of more registers: two are compared at once."""
    assert all(is_float(value.type) for value in values)
    for a, b in zip(values[::2], [*values[1::2], values[-1]]):
        found = f.or_(found, f.compare("uno", a, b))
    return found


def with_nan(f: FunctionBuilder, found: Value, total: Value) -> Value:
    """A scalar, or NaN if there was any."""
    return f.select(f.any_lane(found), constant(math.nan, total.type), total)

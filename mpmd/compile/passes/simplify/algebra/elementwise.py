"""Rules of elementwise operations: neutral constants, order of operands, simple powers, conversions, choices.

Exact for every value but where a rule says otherwise.  `x + 0` gives x, so that -0 + 0 becomes -0, not 0.  A
conversion is dropped only if it kept every value.
"""

from __future__ import annotations

import math

import ml_dtypes

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import MANTISSA
from mpmd.compile.passes.rewriter import (
    RewriteSite,
    Rule,
    is_identity,
    is_negative_zero,
    is_number,
    is_splat,
    splat,
)


def constant_to_the_right(site: RewriteSite) -> HloInstruction | None:
    a, b = site.operands
    if splat(a) is None or splat(b) is not None:
        return None
    return site.same(b, a)


def add_zero(site: RewriteSite) -> HloInstruction | None:
    """X + 0 → x."""
    a, b = site.operands
    return a if is_splat(b, 0) else None


def subtract_zero(site: RewriteSite) -> HloInstruction | None:
    """X - 0 → x; 0 - x → -x, of integers."""
    a, b = site.operands
    if is_splat(b, 0) and not is_negative_zero(b):
        return a
    if is_splat(a, 0) and not is_number(a):
        return site.build.add("negate", b)
    return None


def multiply_one(site: RewriteSite) -> HloInstruction | None:
    """X * 1 → x, x / 1 → x."""
    a, b = site.operands
    if site.shape.info.kind == "complex":
        return None
    return a if is_splat(b, 1) else None


def divide_by_power_of_two(site: RewriteSite) -> HloInstruction | None:
    """X / c → x * (1/c), where 1/c is exact and c and 1/c are normal numbers."""
    a, b = site.operands
    if site.shape.dtype not in ("f32", "f64", "bf16", "f16"):
        return None
    value = splat(b)
    if value is None:
        return None
    mantissa, exponent = math.frexp(abs(float(value)))
    limit = 12 if site.shape.dtype == "f16" else 120
    if mantissa != 0.5 or abs(exponent) > limit:  # as of zero, infinity and NaN
        return None
    return site.build.add("multiply", a, full(site, 1 / float(value)))


def power_of_simple_exponent(site: RewriteSite) -> HloInstruction | None:
    """power(x, 0) → 1, power(x, 1) → x, power(x, 2) → x * x, power(x, -1) → 1 / x."""
    x, exponent = site.operands
    if is_splat(exponent, 0):
        return full(site, 1)
    if is_splat(exponent, 1):
        return x
    if is_splat(exponent, 2):
        return site.build.add("multiply", x, x)
    if site.shape.info.kind == "float" and is_splat(exponent, -1):
        return site.build.add("divide", full(site, 1), x)
    return None


def full(site: RewriteSite, value: float) -> HloInstruction:
    return site.build.full(value, site.shape.dtype, site.shape.dims)


def zeros(site: RewriteSite) -> HloInstruction:
    return full(site, 0)


_FLIPPED = {"EQ": "EQ", "NE": "NE", "GE": "LE", "GT": "LT", "LE": "GE", "LT": "GT"}


def neutral(site: RewriteSite) -> HloInstruction | None:
    """X & ~0 → x, x | 0 → x, x ^ 0 → x, max(x, smallest) → x, min(x, largest) → x."""
    a, b = site.operands
    return a if is_identity(site.at.opcode, b) else None


def compare_constant_to_the_right(site: RewriteSite) -> HloInstruction | None:
    """C < x → x > c."""
    a, b = site.operands
    if splat(a) is None or splat(b) is not None:
        return None
    return site.same(b, a, direction=_FLIPPED[site.at.direction])


def select_constant(site: RewriteSite) -> HloInstruction | None:
    """select(true, a, b) → a, select(false, a, b) → b."""
    p, a, b = site.operands
    value = splat(p)
    return None if value is None else a if value else b


def _format(dtype: str) -> tuple[int, int, int]:
    """Stored mantissa bits of a float, smallest and largest exponent of its normal numbers."""
    info = ml_dtypes.finfo(DTYPES[dtype].numpy)  # type: ignore[no-untyped-call]
    return info.nmant, info.minexp, info.maxexp - 1


def is_lossless(source: str, target: str) -> bool:
    """True if every value of one element type is a value of the other."""
    if source == target:
        return True
    if source == "pred":
        return target != "f8e8m0fnu"  # which has no zero
    a, b = DTYPES[source], DTYPES[target]
    if b.kind == "complex":
        part = "f32" if target == "c64" else "f64"
        return source == "c64" if a.kind == "complex" else is_lossless(source, part)
    if a.is_integral and b.is_integral:
        if a.kind == b.kind:
            return a.bits <= b.bits
        return a.kind == "unsigned" and a.bits < b.bits
    if target not in MANTISSA:  # infinities become something else
        return False
    if a.is_integral:
        digits = a.bits - (a.kind == "signed")
        return digits <= _format(target)[0] + 1
    if not a.is_floating:
        return False
    (m, low, high), (wide, lowest, highest) = _format(source), _format(target)
    return m <= wide and high <= highest and low >= lowest


def convert_twice(site: RewriteSite) -> HloInstruction | None:
    """convert(convert(x)) → convert(x), where the first conversion kept every value.

    An integer that its target cannot hold wraps, but saturates if it has been a float.
    """
    (inner,) = site.operands
    if inner.opcode != "convert":
        return None
    (x,) = inner.operands
    source, between, target = (v.shape.info for v in (x, inner, site.at))
    if not is_lossless(source.name, between.name):
        return None
    wraps = source.is_integral and target.is_integral and not is_lossless(source.name, target.name)
    if wraps and not between.is_integral:
        return None
    return site.build.convert(x, target.name)


def copy_nothing(site: RewriteSite) -> HloInstruction | None:
    """A copy to the same layout → its operand; a copy of a copy → one copy."""
    (x,) = site.operands
    if x.shape is site.shape:
        return x
    if x.opcode == "copy":
        return site.build.add("copy", x.operands[0], shape=site.shape)
    return None


RULES: dict[str, tuple[Rule, ...]] = {
    "add": (constant_to_the_right, add_zero),
    "subtract": (subtract_zero,),
    "multiply": (constant_to_the_right, multiply_one),
    "divide": (multiply_one, divide_by_power_of_two),
    "power": (power_of_simple_exponent,),
    **dict.fromkeys(("and", "or", "xor", "maximum", "minimum"), (constant_to_the_right, neutral)),
    "compare": (compare_constant_to_the_right,),
    "select": (select_constant,),
    "convert": (convert_twice,),
    "copy": (copy_nothing,),
}

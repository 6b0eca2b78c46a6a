"""Rules of arithmetic: neutral constants, order of operands, simple powers.

Exact for every value but where a rule says otherwise.  `x + 0` gives x, so that -0 + 0 becomes -0, not 0.
"""

from __future__ import annotations

import math

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.values import is_negative_zero, is_number, is_splat, splat


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


RULES: dict[str, tuple[Rule, ...]] = {
    "add": (constant_to_the_right, add_zero),
    "subtract": (subtract_zero,),
    "multiply": (constant_to_the_right, multiply_one),
    "divide": (multiply_one, divide_by_power_of_two),
    "power": (power_of_simple_exponent,),
}

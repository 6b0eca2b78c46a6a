"""Rules of powers, roots and exponentials.

Those of `RULES` differ from what they replace in the last bit at most.  Those of `APPROXIMATE` may lose
accuracy, or change results for infinite and negative arguments; the option `approximate` adds them.
"""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.simplify.algebra.arithmetic import full, zeros
from mpmd.compile.passes.values import is_splat

_NOT_NEGATIVE = frozenset(["abs", "exponential", "logistic"])


def _float(site: RewriteSite) -> bool:
    return site.shape.info.kind == "float"


def power_of_simple_exponent(site: RewriteSite) -> HloInstruction | None:
    """power(x, 0) → 1, power(x, 1) → x, power(x, 2) → x * x, power(x, -1) → 1 / x."""
    x, exponent = site.operands
    if is_splat(exponent, 0):
        return full(site, 1)
    if is_splat(exponent, 1):
        return x
    if is_splat(exponent, 2):
        return site.build.add("multiply", x, x)
    if _float(site) and is_splat(exponent, -1):
        return site.build.add("divide", full(site, 1), x)
    return None


def power_of_half(site: RewriteSite) -> HloInstruction | None:
    """power(x, 1/2) → sqrt(x), power(x, -1/2) → rsqrt(x), where x is not negative."""
    x = site.operands[0]
    return _root(site) if is_not_negative(x) else None


def power_of_half_of_any(site: RewriteSite) -> HloInstruction | None:
    """power(x, 1/2) → sqrt(x), power(x, -1/2) → rsqrt(x): not the same at -0 and -inf."""
    return _root(site)


def _root(site: RewriteSite) -> HloInstruction | None:
    x, exponent = site.operands
    if not _float(site):
        return None
    if is_splat(exponent, 0.5):
        return site.build.add("sqrt", x)
    if is_splat(exponent, -0.5):
        return site.build.add("rsqrt", x)
    return None


def is_not_negative(x: HloInstruction) -> bool:
    """True if no element can be negative, -0 included; NaN may occur."""
    if x.opcode in ("broadcast", "reshape", "transpose", "convert", "slice", "copy", "add"):
        return x.shape.info.kind == "float" and all(is_not_negative(o) for o in x.operands)
    if x.opcode == "multiply":
        return x.operands[0] is x.operands[1]
    if x.opcode == "constant":
        return x.shape.is_scalar and x.literal is not None and bool(x.literal > 0)  # type: ignore[operator]
    return x.opcode in _NOT_NEGATIVE


def divide_by_root(site: RewriteSite) -> HloInstruction | None:
    """X / sqrt(y) → x * rsqrt(y), x / rsqrt(y) → x * sqrt(y)."""
    x, y = site.operands
    if not _float(site) or y.opcode not in ("sqrt", "rsqrt"):
        return None
    other = site.build.add("rsqrt" if y.opcode == "sqrt" else "sqrt", y.operands[0])
    return other if is_splat(x, 1) else site.build.add("multiply", x, other)


def multiply_exponentials(site: RewriteSite) -> HloInstruction | None:
    """exp(x) * exp(y) → exp(x + y)."""
    a, b = site.operands
    if a.opcode != "exponential" or b.opcode != "exponential":
        return None
    return site.build.add("exponential", site.build.add("add", a.operands[0], b.operands[0]))


def multiply_roots(site: RewriteSite) -> HloInstruction | None:
    """sqrt(x) * sqrt(x) → x, rsqrt(x) * rsqrt(x) → 1 / x."""
    a, b = site.operands
    if a is not b or a.opcode not in ("sqrt", "rsqrt") or not _float(site):
        return None
    x = a.operands[0]
    return x if a.opcode == "sqrt" else site.build.add("divide", full(site, 1), x)


def multiply_by_zero(site: RewriteSite) -> HloInstruction | None:
    """X * 0 → 0."""
    return zeros(site) if is_splat(site.operands[1], 0) else None


def logarithm_of_exponential(site: RewriteSite) -> HloInstruction | None:
    """log(exp(x)) → x."""
    (inner,) = site.operands
    return inner.operands[0] if inner.opcode == "exponential" and _float(site) else None


RULES: dict[str, tuple[Rule, ...]] = {"power": (power_of_simple_exponent, power_of_half)}

APPROXIMATE: dict[str, tuple[Rule, ...]] = {
    "power": (power_of_half_of_any,),
    "divide": (divide_by_root,),
    "multiply": (multiply_exponentials, multiply_roots, multiply_by_zero),
    "log": (logarithm_of_exponential,),
}

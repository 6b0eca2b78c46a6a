"""Rules of arithmetic: neutral and absorbing constants, double negation, order of operands.

Exact for every value but where a rule says otherwise.  `x + 0` gives x, so that -0 + 0 becomes -0, not 0;
`keep_zero_signs` turns that off.
"""

from __future__ import annotations

import math

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.values import is_negative_zero, is_number, is_splat, splat


def constant_to_the_right(site: RewriteSite) -> HloInstruction | None:
    """C op x → x op c."""
    a, b = site.operands
    if splat(a) is None or splat(b) is not None:
        return None
    return site.same(b, a)


def gather_constants(site: RewriteSite) -> HloInstruction | None:
    """(x op c) op d → x op (c op d), of integers: floats would round differently."""
    inner, outer = site.operands
    if is_number(outer) or splat(outer) is None or inner.opcode != site.at.opcode:
        return None
    x, c = inner.operands
    if splat(c) is None or splat(x) is not None:
        return None
    return site.same(x, site.same(c, outer))


def add_zero(site: RewriteSite) -> HloInstruction | None:
    """X + 0 → x."""
    a, b = site.operands
    return a if is_splat(b, 0) else None


def add_negative_zero(site: RewriteSite) -> HloInstruction | None:
    """X + -0 → x, and of integers x + 0 → x: exact for signed zeros too."""
    a, b = site.operands
    if is_negative_zero(b) or (not is_number(b) and is_splat(b, 0)):
        return a
    return None


def add_negation(site: RewriteSite) -> HloInstruction | None:
    """X + -y → x - y, -x + y → y - x."""
    a, b = site.operands
    if b.opcode == "negate":
        return site.build.add("subtract", a, b.operands[0])
    if a.opcode == "negate":
        return site.build.add("subtract", b, a.operands[0])
    return None


def subtract_zero(site: RewriteSite) -> HloInstruction | None:
    """X - 0 → x; 0 - x → -x, of integers."""
    a, b = site.operands
    if is_splat(b, 0) and not is_negative_zero(b):
        return a
    if is_splat(a, 0) and not is_number(a):
        return site.build.add("negate", b)
    return None


def subtract_itself(site: RewriteSite) -> HloInstruction | None:
    """X - x → 0, of integers: NaN - NaN is NaN."""
    a, b = site.operands
    return zeros(site) if a is b and not is_number(a) else None


def subtract_negation(site: RewriteSite) -> HloInstruction | None:
    """X - -y → x + y."""
    a, b = site.operands
    return site.build.add("add", a, b.operands[0]) if b.opcode == "negate" else None


def multiply_one(site: RewriteSite) -> HloInstruction | None:
    """X * 1 → x, x / 1 → x."""
    a, b = site.operands
    if site.shape.info.kind == "complex":
        return None
    return a if is_splat(b, 1) else None


def multiply_zero(site: RewriteSite) -> HloInstruction | None:
    """X * 0 → 0, of integers: NaN * 0 is NaN."""
    return zeros(site) if not is_number(site.at) and is_splat(site.operands[1], 0) else None


def multiply_minus_one(site: RewriteSite) -> HloInstruction | None:
    """X * -1 → -x, x / -1 → -x."""
    a, b = site.operands
    if site.shape.info.kind not in ("float", "signed") or not is_splat(b, -1):
        return None
    return site.build.add("negate", a)


def multiply_negations(site: RewriteSite) -> HloInstruction | None:
    """-x * -y → x * y, -x / -y → x / y; not of the smallest integers, whose division overflows."""
    a, b = site.operands
    if a.opcode == b.opcode == "negate" and (site.at.opcode == "multiply" or is_number(site.at)):
        return site.same(a.operands[0], b.operands[0])
    return None


def divide_by_power_of_two(site: RewriteSite) -> HloInstruction | None:
    """X / c → x * (1/c), where 1/c is exact and c and 1/c are normal numbers."""
    a, b = site.operands
    if site.shape.dtype not in ("f32", "f64", "bf16", "f16"):
        return None
    value = splat(b)
    if value is None or value == 0 or not math.isfinite(float(value)):
        return None
    mantissa, exponent = math.frexp(abs(float(value)))
    limit = 12 if site.shape.dtype == "f16" else 120
    if mantissa != 0.5 or abs(exponent) > limit:
        return None
    return site.build.add("multiply", a, full(site, 1 / float(value)))


def divide_unsigned_by_power_of_two(site: RewriteSite) -> HloInstruction | None:
    """X / 2^k → x >> k, x % 2^k → x & (2^k - 1), of unsigned integers."""
    a, b = site.operands
    value = splat(b) if site.shape.info.kind == "unsigned" else None
    if value is None or int(value) <= 0 or int(value) & (int(value) - 1):
        return None
    if site.at.opcode == "divide":
        return site.build.add("shift-right-logical", a, full(site, int(value).bit_length() - 1))
    return site.build.add("and", a, full(site, int(value) - 1))


def remainder_of_one(site: RewriteSite) -> HloInstruction | None:
    """X % 1 → 0, of integers."""
    return zeros(site) if not is_number(site.at) and is_splat(site.operands[1], 1) else None


def negate_twice(site: RewriteSite) -> HloInstruction | None:
    """--x → x."""
    (inner,) = site.operands
    return inner.operands[0] if inner.opcode == "negate" else None


def negate_difference(site: RewriteSite) -> HloInstruction | None:
    """-(x - y) → y - x, of integers: of floats the sign of a zero would change."""
    (inner,) = site.operands
    if inner.opcode != "subtract" or is_number(inner):
        return None
    return site.build.add("subtract", inner.operands[1], inner.operands[0])


def same_again(site: RewriteSite) -> HloInstruction | None:
    """f(f(x)) → f(x), for f that gives what it is given the second time."""
    (inner,) = site.operands
    return inner if inner.opcode == site.at.opcode and inner.shape is site.shape else None


def absolute_of_negation(site: RewriteSite) -> HloInstruction | None:
    """|-x| → |x|, of floats and of integers whose smallest one stays what it is."""
    (inner,) = site.operands
    if inner.opcode != "negate" or site.shape.info.kind == "complex":
        return None
    return site.build.add("abs", inner.operands[0])


def full(site: RewriteSite, value: float) -> HloInstruction:
    """One value everywhere, in the shape of the instruction."""
    return site.build.full(value, site.shape.dtype, site.shape.dims)


def zeros(site: RewriteSite) -> HloInstruction:
    """Zeros in the shape of the instruction."""
    return full(site, 0)


RULES: dict[str, tuple[Rule, ...]] = {
    "add": (constant_to_the_right, gather_constants, add_negation),
    "subtract": (subtract_zero, subtract_itself, subtract_negation),
    "multiply": (
        constant_to_the_right,
        multiply_one,
        multiply_zero,
        multiply_minus_one,
        multiply_negations,
        gather_constants,
    ),
    "divide": (
        multiply_one,
        multiply_minus_one,
        multiply_negations,
        divide_by_power_of_two,
        divide_unsigned_by_power_of_two,
    ),
    "remainder": (remainder_of_one, divide_unsigned_by_power_of_two),
    "negate": (negate_twice, negate_difference),
    "abs": (same_again, absolute_of_negation),
    **dict.fromkeys(("floor", "ceil", "round-nearest-afz", "round-nearest-even", "sign"), (same_again,)),
}
"""By opcode; `add_zero` or `add_negative_zero` joins those of add."""

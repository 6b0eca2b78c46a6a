"""Rules of bits, orders and choices: and, or, xor, not, shifts, maximum, minimum, clamp, compare, select.

All are exact.
"""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.simplify.algebra.arithmetic import (
    constant_to_the_right,
    full,
    gather_constants,
    zeros,
)
from mpmd.compile.passes.values import all_ones, integer, is_identity, is_number, is_splat, splat

_FLIPPED = {"EQ": "EQ", "NE": "NE", "GE": "LE", "GT": "LT", "LE": "GE", "LT": "GT"}
_INVERTED = {"EQ": "NE", "NE": "EQ", "GE": "LT", "GT": "LE", "LE": "GT", "LT": "GE"}


def neutral(site: RewriteSite) -> HloInstruction | None:
    """X & ~0 → x, x | 0 → x, x ^ 0 → x, max(x, smallest) → x, min(x, largest) → x."""
    a, b = site.operands
    return a if is_identity(site.at.opcode, b) else None


def absorbing(site: RewriteSite) -> HloInstruction | None:
    """X & 0 → 0, x | ~0 → ~0."""
    b = site.operands[1]
    if site.at.opcode == "and":
        return b if is_splat(b, 0) else None
    return b if all_ones(b) else None


def with_itself(site: RewriteSite) -> HloInstruction | None:
    """X & x, x | x, max(x, x), min(x, x) → x."""
    a, b = site.operands
    return a if a is b else None


def xor_itself(site: RewriteSite) -> HloInstruction | None:
    """X ^ x → 0."""
    a, b = site.operands
    return zeros(site) if a is b else None


def not_not(site: RewriteSite) -> HloInstruction | None:
    """~~x → x."""
    (inner,) = site.operands
    return inner.operands[0] if inner.opcode == "not" else None


def not_compare(site: RewriteSite) -> HloInstruction | None:
    """Not (a < b) → a >= b; of floats only not (a == b) → a != b, because of NaN."""
    (inner,) = site.operands
    if inner.opcode != "compare":
        return None
    if is_number(inner.operands[0]) and inner.direction not in ("EQ", "NE"):
        return None
    return site.build.like(inner, inner.operands, direction=_INVERTED[inner.direction])


def shift_by_nothing(site: RewriteSite) -> HloInstruction | None:
    """X << 0 → x; of logical shifts by all bits or more: 0."""
    a, b = site.operands
    if is_splat(b, 0):
        return a
    count = splat(b)
    if count is None or site.at.opcode == "shift-right-arithmetic":
        return None
    return zeros(site) if not 0 <= int(count) < site.shape.info.bits else None


def shift_twice(site: RewriteSite) -> HloInstruction | None:
    """(x << a) << b → x << (a + b), the same for both right shifts."""
    inner, b = site.operands
    if inner.opcode != site.at.opcode:
        return None
    x, a = inner.operands
    first, second = splat(a), splat(b)
    bits = site.shape.info.bits
    if first is None or second is None or int(first) < 0 or int(second) < 0:
        return None
    if int(first) + int(second) >= bits:
        return None
    return site.same(x, full(site, int(first) + int(second)))


def clamp_full_range(site: RewriteSite) -> HloInstruction | None:
    """clamp(smallest, x, largest) → x, of integers."""
    low, x, high = site.operands
    if is_number(x) or not (is_identity("maximum", low) and is_identity("minimum", high)):
        return None
    return x


def clamp_iota(site: RewriteSite) -> HloInstruction | None:
    """clamp(a, iota, b) → iota, where it stays between a and b."""
    low, x, high = site.operands
    if x.opcode != "iota" or is_number(x):
        return None
    a, b = integer(low), integer(high)
    top = x.shape.dims[x.iota_dimension] - 1
    return x if a is not None and b is not None and a <= 0 and top <= b else None


def clamp_between_equal(site: RewriteSite) -> HloInstruction | None:
    """clamp(c, x, c) → c, of integers: NaN stays NaN."""
    low, x, high = site.operands
    a, b = integer(low), integer(high)
    return full(site, a) if a is not None and a == b and not is_number(x) else None


def compare_itself(site: RewriteSite) -> HloInstruction | None:
    """X == x → true, x < x → false, of integers."""
    a, b = site.operands
    if a is not b or is_number(a):
        return None
    return full(site, site.at.direction in ("EQ", "GE", "LE"))


def compare_constant_to_the_right(site: RewriteSite) -> HloInstruction | None:
    """C < x → x > c."""
    a, b = site.operands
    if splat(a) is None or splat(b) is not None:
        return None
    return site.same(b, a, direction=_FLIPPED[site.at.direction])


def compare_bounded(site: RewriteSite) -> HloInstruction | None:
    """Iota < c → true or false where c lies outside the range; likewise of unsigned numbers and 0."""
    x, bound = site.operands
    limit = integer(bound) if x.shape.info.is_integral else None
    if limit is None:
        return None
    low, high = _range(x)
    outcome = {
        "LT": (high < limit, low >= limit),
        "LE": (high <= limit, low > limit),
        "GT": (low > limit, high <= limit),
        "GE": (low >= limit, high < limit),
        "EQ": (low == high == limit, not low <= limit <= high),
        "NE": (not low <= limit <= high, low == high == limit),
    }[site.at.direction]
    return full(site, outcome[0]) if any(outcome) else None


def _range(x: HloInstruction) -> tuple[int, int]:
    info = x.shape.info
    low = -(1 << (info.bits - 1)) if info.kind == "signed" else 0
    high = (1 << (info.bits - (info.kind == "signed"))) - 1
    if x.opcode == "iota" and x.shape.dims[x.iota_dimension] - 1 <= high:
        return 0, x.shape.dims[x.iota_dimension] - 1
    if x.opcode == "convert" and x.operands[0].shape.dtype == "pred":
        return 0, 1
    return low, high


def compare_boolean(site: RewriteSite) -> HloInstruction | None:
    """P == true → p, p != false → p, p == false → not p, p != true → not p."""
    p, constant = site.operands
    if p.shape.dtype != "pred" or site.at.direction not in ("EQ", "NE"):
        return None
    value = splat(constant)
    if value is None:
        return None
    positive = bool(value) == (site.at.direction == "EQ")
    return p if positive else site.build.add("not", p)


def select_constant(site: RewriteSite) -> HloInstruction | None:
    """select(true, a, b) → a, select(false, a, b) → b."""
    p, a, b = site.operands
    value = splat(p)
    return None if value is None else a if value else b


def select_equal(site: RewriteSite) -> HloInstruction | None:
    """select(p, a, a) → a."""
    _, a, b = site.operands
    return a if a is b else None


def select_not(site: RewriteSite) -> HloInstruction | None:
    """select(not p, a, b) → select(p, b, a)."""
    p, a, b = site.operands
    return site.build.select(p.operands[0], b, a) if p.opcode == "not" else None


def select_boolean(site: RewriteSite) -> HloInstruction | None:
    """select(p, true, false) → p, select(p, false, true) → not p."""
    p, a, b = site.operands
    if site.shape.dtype != "pred" or p.shape.logical is not site.shape.logical:
        return None
    first, second = splat(a), splat(b)
    if first is None or second is None or bool(first) == bool(second):
        return None
    return p if first else site.build.add("not", p)


def select_again(site: RewriteSite) -> HloInstruction | None:
    """select(p, select(p, a, b), c) → select(p, a, c), select(p, a, select(p, b, c)) → select(p, a, c)."""
    p, a, b = site.operands
    if a.opcode == "select" and a.operands[0] is p:
        return site.build.select(p, a.operands[1], b)
    if b.opcode == "select" and b.operands[0] is p:
        return site.build.select(p, a, b.operands[2])
    return None


RULES: dict[str, tuple[Rule, ...]] = {
    "and": (constant_to_the_right, neutral, absorbing, with_itself, gather_constants),
    "or": (constant_to_the_right, neutral, absorbing, with_itself, gather_constants),
    "xor": (constant_to_the_right, neutral, xor_itself, gather_constants),
    "maximum": (constant_to_the_right, neutral, with_itself, gather_constants),
    "minimum": (constant_to_the_right, neutral, with_itself, gather_constants),
    "not": (not_not, not_compare),
    "shift-left": (shift_by_nothing, shift_twice),
    "shift-right-logical": (shift_by_nothing, shift_twice),
    "shift-right-arithmetic": (shift_by_nothing,),
    "clamp": (clamp_full_range, clamp_iota, clamp_between_equal),
    "compare": (compare_itself, compare_constant_to_the_right, compare_bounded, compare_boolean),
    "select": (select_constant, select_equal, select_not, select_boolean, select_again),
}

"""Rules of bits, orders and choices: and, or, xor, shifts, maximum, minimum, compare, select.

All are exact.
"""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.simplify.algebra.arithmetic import (
    constant_to_the_right,
    full,
    zeros,
)
from mpmd.compile.passes.values import integer, is_identity, is_number, is_splat, splat

_FLIPPED = {"EQ": "EQ", "NE": "NE", "GE": "LE", "GT": "LT", "LE": "GE", "LT": "GT"}


def neutral(site: RewriteSite) -> HloInstruction | None:
    """X & ~0 → x, x | 0 → x, x ^ 0 → x, max(x, smallest) → x, min(x, largest) → x."""
    a, b = site.operands
    return a if is_identity(site.at.opcode, b) else None


def shift_by_nothing(site: RewriteSite) -> HloInstruction | None:
    """X << 0 → x; of logical shifts by all bits or more: 0."""
    a, b = site.operands
    if is_splat(b, 0):
        return a
    count = splat(b)
    if count is None or site.at.opcode == "shift-right-arithmetic":
        return None
    return zeros(site) if not 0 <= int(count) < site.shape.info.bits else None


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
    """Iota < c → true or false where c is outside the range; likewise of unsigned numbers and 0."""
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
    low, high = integer_range(info.name)
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


def select_boolean(site: RewriteSite) -> HloInstruction | None:
    """select(p, true, false) → p, select(p, false, true) → not p."""
    p, a, b = site.operands
    if site.shape.dtype != "pred" or p.shape.logical is not site.shape.logical:
        return None
    first, second = splat(a), splat(b)
    if first is None or second is None or bool(first) == bool(second):
        return None
    return p if first else site.build.add("not", p)


RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("and", "or", "xor", "maximum", "minimum"), (constant_to_the_right, neutral)),
    **dict.fromkeys(("shift-left", "shift-right-logical", "shift-right-arithmetic"), (shift_by_nothing,)),
    "compare": (compare_itself, compare_constant_to_the_right, compare_bounded, compare_boolean),
    "select": (select_constant, select_equal, select_boolean),
}

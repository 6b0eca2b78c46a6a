"""Rules of bits, orders and choices: and, or, xor, maximum, minimum, compare, select.

All are exact.
"""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.simplify.algebra.arithmetic import (
    constant_to_the_right,
)
from mpmd.compile.passes.value_queries import is_identity, splat

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


RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("and", "or", "xor", "maximum", "minimum"), (constant_to_the_right, neutral)),
    "compare": (compare_constant_to_the_right,),
    "select": (select_constant,),
}

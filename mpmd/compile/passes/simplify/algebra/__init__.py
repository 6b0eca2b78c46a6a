"""The rules of the algebraic simplifier, by family; `TABLE` is the dispatch table."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mpmd.compile.passes.rewriter import Rule
from mpmd.compile.passes.simplify.algebra import (
    arithmetic,
    broadcasts,
    conversions,
    dynamic,
    logic,
    powers,
    products,
    reductions,
    reshapes,
    slices,
    tuples,
)

FAMILIES = (
    arithmetic,
    logic,
    powers,
    conversions,
    reshapes,
    products,
    broadcasts,
    slices,
    dynamic,
    reductions,
    tuples,
)


@functools.cache
def table(keep_zero_signs: bool = False, approximate: bool = False) -> Mapping[str, tuple[Rule, ...]]:
    """The rules of each opcode, in the order in which they are tried."""
    rules: dict[str, tuple[Rule, ...]] = {}
    for family in FAMILIES:
        for opcode, found in family.RULES.items():
            rules[opcode] = rules.get(opcode, ()) + found
    zero = arithmetic.add_negative_zero if keep_zero_signs else arithmetic.add_zero
    rules["add"] = (*rules["add"], zero)
    if approximate:
        for opcode, found in powers.APPROXIMATE.items():
            rules[opcode] = rules.get(opcode, ()) + found
    return rules

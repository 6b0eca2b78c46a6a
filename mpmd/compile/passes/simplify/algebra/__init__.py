"""The rules of the algebraic simplifier, by family; `TABLE` is the dispatch table."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mpmd.compile.passes.rewriter import Rule
from mpmd.compile.passes.simplify.algebra import (
    arithmetic,
    broadcasts,
    conversions,
    logic,
    marks,
    products,
    reductions,
    reshapes,
    slices,
    tuples,
)

FAMILIES = (
    arithmetic,
    logic,
    conversions,
    reshapes,
    products,
    broadcasts,
    slices,
    reductions,
    tuples,
    marks,
)


@functools.cache
def table() -> Mapping[str, tuple[Rule, ...]]:
    """The rules of each opcode, in the order in which they are tried."""
    rules: dict[str, tuple[Rule, ...]] = {}
    for family in FAMILIES:
        for opcode, found in family.RULES.items():
            rules[opcode] = rules.get(opcode, ()) + found
    return rules

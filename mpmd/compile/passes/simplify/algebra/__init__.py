"""The rules of the algebraic simplifier, by family; `TABLE` is the dispatch table."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mpmd.compile.passes.rewriter import Rule
from mpmd.compile.passes.simplify.algebra import (
    elementwise,
    movement,
    products,
    tuples,
)

FAMILIES = (elementwise, movement, products, tuples)


@functools.cache
def table() -> Mapping[str, tuple[Rule, ...]]:
    """The rules of each opcode, in the order in which they are tried."""
    rules: dict[str, tuple[Rule, ...]] = {}
    for family in FAMILIES:
        for opcode, found in family.RULES.items():
            rules[opcode] = rules.get(opcode, ()) + found
    return rules

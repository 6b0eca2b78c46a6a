"""Ops with regions, and their contents."""

from __future__ import annotations

from mpmd import ir

CONDITIONALS = ("stablehlo.case", "stablehlo.if")


def is_conditional(op: ir.Op) -> bool:
    """Whether it runs one of its regions, as `lax.cond` and `lax.switch` do."""
    return op.operation.name in CONDITIONALS


def around(op: ir.Op) -> list[ir.Op]:
    """The ops in whose regions an op is, innermost first, up to its function."""
    found: list[ir.Op] = []
    parent = op.operation.parent
    while parent is not None and parent.name != "builtin.module":
        found.append(parent.opview)
        parent = parent.parent
    return found

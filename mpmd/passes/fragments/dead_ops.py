"""Ops that only compute what nothing uses."""

from __future__ import annotations

from mpmd import ir


def erase_dead_ops(body: ir.Block) -> None:
    """Erases, from a body and from the regions in it, what only computes and is not used."""
    for op in reversed(ir.ops(body)):
        if ir.is_unused(op) and ir.is_pure(op):
            ir.erase(op)
            continue
        for region in op.operation.regions:
            for block in region:
                erase_dead_ops(block)

"""Dead ops: unused, and without side effects."""

from __future__ import annotations

from mpmd import ir


def erase_dead_ops(body: ir.Block) -> None:
    """Erases dead ops from a body and from the regions in it."""
    for op in reversed(ir.ops(body)):
        if ir.is_trivially_dead(op):
            ir.erase(op)
            continue
        regions = op.operation.regions
        if len(regions):
            for region in regions:
                for block in region:
                    erase_dead_ops(block)

"""Dead ops: pure and unused."""

from __future__ import annotations

from mpmd import ir


def is_dead(op: ir.Op) -> bool:
    """Whether an op is pure and unused.

    An unused sharding constraint gives its operand a sharding: it is dead if nothing else uses that.
    """
    if not ir.is_unused(op) or not ir.is_pure(op):
        return False
    return op.operation.name != "sdy.sharding_constraint" or all(u == op for u in ir.users(op.operands[0]))


def erase_dead_ops(body: ir.Block) -> None:
    """Erases dead ops from a body and from the regions in it."""
    for op in reversed(ir.ops(body)):
        if is_dead(op):
            ir.erase(op)
            continue
        regions = op.operation.regions
        if len(regions):
            for region in regions:
                for block in region:
                    erase_dead_ops(block)

"""Inlining of ordinary calls: functions that JAX outlined for its own reasons become plain ops again."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.calls.inline import inline_call


def body_copy(f: ir.Func) -> ir.Func:
    """A copy of a function, beside it, whose body may be taken apart; erase it afterwards."""
    return ir.clone(f, ir.before(f))


def inline_all(block: ir.Block, symbols: dict[str, ir.Func]) -> None:
    """Inlines every ordinary call in a block, and in the regions of its ops, at any depth."""
    todo = ir.ops(block)
    while todo:
        op = todo.pop()
        if isinstance(op, ir.FuncCall):
            todo += inline_call(op, symbols[op.callee.value])
            continue
        for region in op.operation.regions:
            for inner in region.blocks:
                todo += list(inner.operations)[:-1]

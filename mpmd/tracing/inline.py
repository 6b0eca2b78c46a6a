"""Inlining of ordinary calls: what JAX outlined for its own reasons becomes plain ops again."""

from __future__ import annotations

from mpmd import ir


def body_copy(f: ir.Func) -> ir.Func:
    """A copy of a function, beside it, whose body may be taken apart; erase it afterwards."""
    return ir.clone(f, ir.before(f))


def inline_call(call: ir.FuncCall, callee: ir.Func) -> list[ir.Op]:
    """Puts the body of `callee` in the place of a call; returns the ops that came of it."""
    copy = body_copy(callee)
    inner = ir.ops(copy)
    returned = ir.move_body(copy, list(call.operands), call)
    ir.replace(call, returned)
    ir.erase(copy)
    return inner


def inline_all(block: ir.Block, symbols: dict[str, ir.Func]) -> None:
    """Inlines every ordinary call in a block, in its ops' regions too, however deep."""
    todo = ir.ops(block)
    while todo:
        op = todo.pop()
        if isinstance(op, ir.FuncCall):
            todo += inline_call(op, symbols[op.callee.value])
            continue
        for region in op.operation.regions:
            for inner in region.blocks:
                todo += list(inner.operations)[:-1]

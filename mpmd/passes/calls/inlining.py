"""Replaces a call by the body of its callee."""

from __future__ import annotations

from mpmd import ir


def inline_call(call: ir.Call | ir.FuncCall, callee: ir.Func) -> list[ir.Op]:
    """Replaces a call by a copy of the callee's body; the inlined ops, in order."""
    copy: ir.Func = ir.clone(callee, ir.before(callee))
    made = ir.ops(copy)
    returned = ir.move_body(copy, list(call.operands), call)
    ir.replace(call, returned)
    ir.erase(copy)
    return made

"""Putting a function's body in the place of a call."""

from __future__ import annotations

from mpmd import ir


def inline_call(call: ir.Call | ir.FuncCall, callee: ir.Func) -> list[ir.Op]:
    """Replaces a call by a copy of the callee's body; the ops that came of it, in order."""
    copy: ir.Func = ir.clone(callee, ir.before(callee))
    for arg, value in zip(copy.args, call.operands):
        ir.replace_uses(arg, value)
    made = ir.ops(copy)
    ir.move_all_before(made, call)
    ir.replace(call, copy.returned)
    ir.erase(copy)
    return made

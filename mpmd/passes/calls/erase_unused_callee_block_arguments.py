"""mpmd-erase-unused-callee-block-arguments."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.signatures import calls_by_callee, drop_from_call, drop_from_function


class EraseUnusedCalleeBlockArguments(ModulePass):
    """Drops arguments that a callee does not use, or only returns.

        x, y = call body(a, b, c) cc=0        x = call body(a) cc=0
        return x, y                           return x, b
        body(p, q, r):                 -->    body(p):
          s = add p p                           s = add p p
          return s, q                           return s

    Each result that is such an argument is replaced by the operand, at every call.  A function without
    remaining results is erased with its calls, unless it has effects.

    Requires: nothing.  Ensures: each argument of a callee is used by more than its return.  Cost: linear.
    Source: openxla/shardy MPMD, `erase_unused_callee_block_arguments`.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Visits each callee with all its calls."""
        symbols = ir.symbol_table(module)
        for name, calls in calls_by_callee(ir.funcs(module)).items():
            callee = symbols[name]
            if callee.is_mpmd and not callee.is_entry:
                _erase_unused(callee, calls)


def _erase_unused(f: ir.Func, calls: list[ir.Call]) -> None:
    terminator = f.terminator
    position = {arg: i for i, arg in enumerate(f.args) if all(user == terminator for user in ir.users(arg))}
    if not position:
        return
    passed = {r: position[v] for r, v in enumerate(f.returned) if v in position}
    for call in calls:  # in program order, so that a chain of calls ends at the operand of the first
        for result, arg in passed.items():
            ir.replace_uses(call.results[result], call.operands[arg])
    if passed and len(passed) == len(f.returned) and all(map(ir.is_side_effect_free, ir.ops(f))):
        for call in calls:
            ir.erase(call)
        ir.erase(f)
        return
    drop_from_function(f, set(position.values()), set(passed))
    for call in calls:
        drop_from_call(call, set(position.values()), list(passed))

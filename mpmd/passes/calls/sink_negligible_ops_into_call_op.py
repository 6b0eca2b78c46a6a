"""mpmd-sink-negligible-ops-into-call-op."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.signatures import calls_by_callee, drop_from_call, drop_from_function
from mpmd.passes.fragments.editing import erase_dead_ops
from mpmd.passes.import_.insert_nameless_clone_of_negligible_ops import is_negligible

_TOKEN = "stablehlo.create_token"


class SinkNegligibleOpsIntoCallOp(ModulePass):
    """Computes in a callee operands of all its calls that cost nothing to compute.

        c = const 1                          x = call body(a) cc=0
        x = call body(a, c) cc=0             y = call body(x) cc=1
        y = call body(x, c) cc=1      -->    body(p):
        body(p, q):                            c = const 1
          s = add p q                          s = add p c
          return s                             return s

    These are ops without operands, with one result and without effects, and new tokens.  It must be one
    and the same op for all calls.

    Requires: cse has run.  Ensures: no dead code in functions whose calls have changed.  Cost: linear.
    Source: openxla/shardy MPMD, `sink_negligible_ops_into_call_op`.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Visits each callee with all its calls, then cleans up the callers."""
        symbols = ir.symbol_table(module)
        calling = {f.symbol: {call.callee_name for call in ir.walk(f, ir.Call)} for f in ir.funcs(module)}
        changed = {
            name
            for name, calls in calls_by_callee(ir.funcs(module)).items()
            if symbols[name].is_mpmd and _sink(symbols[name], calls)
        }
        for name, callees in calling.items():
            if callees & changed:
                erase_dead_ops(symbols[name].body)


def _sink(f: ir.Func, calls: list[ir.Call]) -> bool:
    """Moves all such ops into a callee; whether there were any."""
    sunk = {}
    for i in range(len(f.args)):
        values = {call.operands[i] for call in calls}
        source = ir.producer(values.pop()) if len(values) == 1 else None
        if source is not None and (is_negligible(source) or source.operation.name == _TOKEN):
            sunk[i] = source  # copying it into each call costs and changes nothing
    if not sunk:
        return False
    where = ir.before(f.body.operations[0])
    for i, source in sunk.items():
        ir.replace_uses(f.args[i], ir.clone(source, where).result)
    drop_from_function(f, sunk)
    for call in calls:
        drop_from_call(call, sunk)
    return True

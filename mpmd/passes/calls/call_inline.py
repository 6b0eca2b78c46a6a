"""mpmd-call-inline."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.inline import inline_call
from mpmd.passes.calls.shared_bodies import share_bodies
from mpmd.support import diagnostics


class CallInline(ModulePass):
    """Replaces each `mpmd.call` by the body of its callee.

        x = call body(a) cc=3
        body(p):                                -->   f = m1["f"] cc=3 (a) { y = add a a; ret y }
          f = m1["f"] (p) { y = add p p; ret y }
          return f

    Inlined fragments and fragment calls get all attributes of the call but its callee, its
    `call_counter` above all; other ops get none.  Callees stay; symbol-dce removes them.  With `share-bodies`
    the copies of a named fragment then call one function for their body.

    Requires: callees are defined and call nothing themselves (errors).  Ensures: no `mpmd.call` is left in
        functions that are not called.  Cost: linear in the inlined ops.
    Source: openxla/shardy MPMD, `call_inline`.

    Attributes:
        share_bodies: let the copies of a named fragment call one function for their body.
    """

    share_bodies: bool = False

    def rewrite(self, module: ir.Module) -> None:
        symbols = ir.symbol_table(module)
        calls = [(f, call) for f in symbols.values() for call in ir.walk(f, ir.Call)]
        calling = {f.symbol for f, _ in calls}
        failed = False
        for f, call in calls:
            problem = _problem(call, f, symbols, calling)
            if problem is not None:
                diagnostics.error(problem, call.location)
                failed = True
        if failed:
            return
        if self.share_bodies:
            callees = [symbols[name] for name in dict.fromkeys(call.callee_name for _, call in calls)]
            share_bodies([fragment for f in callees for fragment in ir.fragments(f) if fragment.is_user])
        for _, call in calls:
            attributes = {name: a for name, a in call.attributes.items() if name != "callee"}
            where = call.location
            for op in inline_call(call, symbols[call.callee_name]):
                op.operation.location = ir.Location.callsite(op.location, [where])
                for fragment in [op] if not isinstance(op, ir.For) else ir.walk(op):
                    if isinstance(fragment, (ir.Fragment, ir.FragmentCall)):
                        for name, attribute in attributes.items():
                            ir.put(fragment, name, attribute)


def _problem(call: ir.Call, f: ir.Func, symbols: dict[str, ir.Func], calling: set[str]) -> str | None:
    name = call.callee_name
    if name not in symbols or symbols[name].is_external:
        return f"@{f.symbol} calls @{name}, which has no body in this module"
    if name in calling:
        return (
            f"@{f.symbol} calls @{name}, which has calls itself: the work of one microbatch cannot consist "
            "of other microbatches, nor of itself"
        )
    return None

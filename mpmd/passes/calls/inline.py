"""Passes that replace calls by the bodies of their callees."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.structure import called_by, reached_from


def inline_call(call: ir.Call | ir.FuncCall, callee: ir.Func) -> list[ir.Op]:
    """Replaces a call by a copy of the callee's body; the inlined ops, in order."""
    copy: ir.Func = ir.clone(callee, ir.before(callee))
    made = ir.ops(copy)
    returned = ir.move_body(copy, list(call.operands), call)
    ir.replace(call, returned)
    ir.erase(copy)
    return made


class Inline(ModulePass):
    """Inlines ordinary calls, at any depth.  The functions stay; symbol-dce removes them.

        y = func.call g(a)
        g(p): s = add p p; return s     -->    y = add a a

    Functions that JAX outlined for its own reasons become plain ops.  MLIR's own inliner has no effect here:
    jaxlib does not register the half of it that belongs to `func`.  Calls of recursive functions, of
    functions without a body or with several blocks, and `mpmd.call`s stay.

    Requires: nothing.  Ensures: no other `func.call` is left.  Cost: linear in the inlined ops.
    Source: MLIR, `inline`.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Callees before callers, so that copied bodies have no calls left."""
        symbols = ir.symbol_table(module)
        called = {name: called_by(f) for name, f in symbols.items()}
        done: dict[str, bool] = {}  # whether a function can be inlined
        for name in symbols:
            for ready in _callees_first(name, called):
                if ready in done:
                    continue
                blocks = symbols[ready].regions[0].blocks
                done[ready] = ready not in reached_from([ready], called) and len(blocks) == 1
                for call in ir.walk(symbols[ready], ir.FuncCall):
                    callee = call.callee.value
                    if done.get(callee, False):
                        inline_call(call, symbols[callee])


def _callees_first(name: str, called: dict[str, list[str]]) -> list[str]:
    """The transitive callees of `name`, each after its own callees; `name` is last."""
    order: dict[str, None] = {}
    open_: set[str] = set()
    todo = [(name, False)]
    while todo:
        current, is_left = todo.pop()
        if is_left:
            order[current] = None
        elif current not in open_ and current in called:
            open_.add(current)
            todo.append((current, True))
            todo += [(callee, False) for callee in reversed(called[current])]
    return list(order)

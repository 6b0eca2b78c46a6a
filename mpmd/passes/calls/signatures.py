"""Signatures of callees, changed with all their calls: fewer arguments, or constants moved inside."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.fragments.editing import erase_dead_ops, filter_attributes
from mpmd.passes.structure import is_negligible


def calls_by_callee(functions: Iterable[ir.Func]) -> dict[str, list[ir.Call]]:
    """Name of each function that some functions call -> its calls, in program order."""
    by_callee: dict[str, list[ir.Call]] = {}
    for f in functions:
        for op in ir.ops(f):
            has_regions = len(op.operation.regions) and not isinstance(op, ir.Fragment)
            for call in ir.walk(op, ir.Call) if has_regions or isinstance(op, ir.Call) else ():
                by_callee.setdefault(call.callee_name, []).append(call)
    return by_callee


def drop_from_function(f: ir.Func, args: Collection[int], results: Collection[int] = ()) -> None:
    """Drops unused arguments, and results, of a function; the others keep their attributes."""
    kept_args = [i for i in range(len(f.args)) if i not in args]
    returned = f.returned
    kept_results = [i for i in range(len(returned)) if i not in results]
    if results:
        f.returned = [returned[i] for i in kept_results]
    ir.erase_args(f.body, args)
    filter_attributes(f, kept_args, kept_results)
    ir.return_types_changed(f)


def drop_from_call(call: ir.Call, operands: Collection[int], results: Sequence[int] = ()) -> None:
    """Drops operands, and unused results, of a call; its attributes stay."""
    inputs = [v for i, v in enumerate(call.operands) if i not in operands]
    kept = [r for i, r in enumerate(call.results) if i not in results]
    rebuilt = ir.rebuild(call, inputs, [r.type for r in kept])
    for old, new in zip(kept, rebuilt.results):
        ir.replace_uses(old, new)
    ir.erase(call)


def fill_attributes(f: ir.Func) -> None:
    """Gives the arguments and results that a function got without attributes an empty entry each."""
    for name, count in (("arg_attrs", len(f.args)), ("res_attrs", len(f.returned))):
        if name in f.attributes:
            dicts = ir.attribute_dicts(f, name, count)
            ir.put_attribute_dicts(f, name, dicts + [{}] * (count - len(dicts)))


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

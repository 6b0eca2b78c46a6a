"""Signatures of callees, changed together with all their calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.fragments.editing import filter_attributes


def calls_by_callee(functions: Iterable[ir.Func]) -> dict[str, list[ir.Call]]:
    """Name of each function that some functions call -> its calls, in program order."""
    found: dict[str, list[ir.Call]] = {}
    for f in functions:
        for op in ir.ops(f):
            has_regions = len(op.operation.regions) and not isinstance(op, ir.Fragment)
            for call in ir.walk(op, ir.Call) if has_regions or isinstance(op, ir.Call) else ():
                found.setdefault(call.callee_name, []).append(call)
    return found


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
    made = ir.rebuild(call, inputs, [r.type for r in kept])
    for old, new in zip(kept, made.results):
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

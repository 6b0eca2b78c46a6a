"""mpmd-simplify-program."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.calls.shared_bodies import narrow_calls
from mpmd.passes.fragments.dead_ops import erase_dead_ops
from mpmd.passes.fragments.dropping import drop


class SimplifyProgram(FunctionPass):
    """Removes from fragments forwarded, unneeded and duplicate values.

        f, g, h = m1["f"] (a, a as b) {x = add a b; ret x, x, a};  k = m1["k"] (f, g, h) {...}
        ->  f = m1["f"] (a) {x = add a a; ret x};  k = m1["k"] (f, a) {...}

    Shardings are part of types here: only values with the same sharding are the same.

    Requires: nothing.
    Ensures: in each fragment no equal operands or results, no result that is an argument of its type, no
        unused result of a pure op, no unused operand; pure fragments without results are gone.  Attributes
        per operand and result follow.
    Cost: linear, times the length of the longest chain of fragments that only pass values on.
    Source: openxla/shardy MPMD, `simplify_program`; that attributes follow is ours.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """Last first, so that unused results are found before their producer is visited.

        Where a result was replaced, readers, which were visited before, may now have duplicates.
        """
        again = True
        while again:
            again = False
            for fragment in reversed(ir.fragments(f)):
                again |= _simplify(fragment)


def _simplify(fragment: ir.Fragment) -> bool:
    """One round over one fragment; whether one of its results was replaced."""
    first_arg: dict[ir.Value, ir.Value] = {}
    for value, arg in zip(fragment.inputs, fragment.args):
        ir.replace_uses(arg, first_arg.setdefault(value, arg))
    outside = dict(zip(fragment.args, fragment.inputs))
    returned, results = fragment.returned, list(fragment.results)
    first_result: dict[tuple[ir.Value, ir.Type], ir.Value] = {}
    gone: set[int] = set()
    for i, (value, result) in enumerate(zip(returned, results)):
        if value in outside and outside[value].type == result.type:
            same = outside[value]
        else:
            same = first_result.setdefault((value, result.type), result)
        if same != result:
            ir.replace_uses(result, same)
            gone.add(i)
    replaced = bool(gone)
    gone |= _unneeded(fragment, gone, results, returned)
    fragment = drop(fragment, results=gone)
    erase_dead_ops(fragment.body)
    narrow_calls(fragment)
    fragment = drop(fragment, inputs={i for i, arg in enumerate(fragment.args) if ir.is_unused(arg)})
    if not len(fragment.results) and not ir.ops(fragment.body):
        ir.erase(fragment)
    return replaced


def _unneeded(
    fragment: ir.Fragment, gone: set[int], results: list[ir.Value], returned: list[ir.Value]
) -> set[int]:
    """Unused results that may go: those of pure ops; the last one only with all of a pure fragment."""
    unused = [i for i in range(len(results)) if i not in gone and ir.is_unused(results[i])]
    if len(gone) + len(unused) == len(results) and ir.is_pure(fragment):
        return set(unused)
    pure = {i for i in unused if (op := ir.producer(returned[i])) is None or ir.is_pure(op)}
    if pure and len(gone) + len(pure) == len(results):
        pure.discard(min(pure))
    return pure

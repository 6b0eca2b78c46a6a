"""Dead fragments, equal ones, and values of a fragment that are forwarded, unneeded or there twice."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.calls.bodies import narrow_calls
from mpmd.passes.fragments.editing import drop, erase_dead_ops


class FragmentDce(FunctionPass):
    """Drops unused results of fragments, ops in them, their operands, whole fragments, transfers.

        f, g = m1["f"] cc=0 (a, b) { x = add a a; y = mul b b; ret x, y }
        t = transfer g to m2
        return f
        -->
        f = m1["f"] cc=0 (a) { x = add a a; ret x }

    Ops with effects stay, and their operands.  Attributes with one entry per operand or result keep
    the entries of the remaining ones.

    Requires: values are defined before they are used.  Ensures: nothing more to drop.  Cost: linear.
    Source: openxla/shardy MPMD, `fragment_dce`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """Users come before producers, so one traversal suffices."""
        for op in reversed(ir.ops(f, (ir.Fragment, ir.Transfer))):
            if isinstance(op, ir.Fragment):
                left = remove_dead_code(op)
                if left is not None and narrow_calls(left):
                    remove_dead_code(left)
            elif ir.is_unused(op):
                ir.erase(op)


def remove_dead_code(fragment: ir.Fragment) -> ir.Fragment | None:
    """Drops unused results, ops and inputs.  None if nothing was left and it is erased."""
    fragment = drop(fragment, results={i for i, r in enumerate(fragment.results) if ir.is_unused(r)})
    erase_dead_ops(fragment.body)
    fragment = drop(fragment, inputs={i for i, a in enumerate(fragment.args) if ir.is_unused(a)})
    if fragment.results or fragment.inputs or ir.ops(fragment.body):
        return fragment
    ir.erase(fragment)
    return None


class FragmentDedup(FunctionPass):
    """Uses one of several equal operands, and one of several equal results, of a fragment.

        f, g = m1["f"] (a as p, a as q) { x = add p q; ret x, x }
        h = m1["h"] (f, g) { y = mul f g; ret y }
        -->
        f, g = m1["f"] (a as p, a as q) { x = add p p; ret x, x }
        h = m1["h"] (f, f as g) { y = mul f f; ret y }

    Results are equal if one inner value is returned with one type: other shardings or memories are other
    results.  Unused values stay; fragment-dce removes them.

    Requires: values are defined before they are used.  Ensures: each operand and each result is used once.
    Cost: linear.  Source: openxla/shardy MPMD, `fragment_dedup`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """Producers first: when a fragment is visited, equal operands of it are one value."""
        for fragment in ir.fragments(f):
            first_arg: dict[ir.Value, ir.Value] = {}
            for value, arg in zip(fragment.inputs, fragment.args):
                ir.replace_uses(arg, first_arg.setdefault(value, arg))
            first_result: dict[tuple[ir.Value, ir.Type], ir.Value] = {}
            for value, result in zip(fragment.returned, fragment.results):
                ir.replace_uses(result, first_result.setdefault((value, result.type), result))


def simplify(fragment: ir.Fragment | ir.NamedComputation) -> bool:
    """One round over one fragment or named computation; whether one of its results was replaced."""
    first_arg: dict[ir.Value, ir.Value] = {}
    for value, arg in zip(fragment.operands, fragment.args):
        ir.replace_uses(arg, first_arg.setdefault(value, arg))
    outside = dict(zip(fragment.args, fragment.operands))
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
    gone |= _unneeded(fragment, gone)
    fragment = drop(fragment, results=gone)
    erase_dead_ops(fragment.body)
    narrow_calls(fragment)
    fragment = drop(fragment, inputs={i for i, arg in enumerate(fragment.args) if ir.is_unused(arg)})
    if not len(fragment.results) and not ir.ops(fragment.body):
        ir.erase(fragment)
    return replaced


def _unneeded(fragment: ir.Fragment | ir.NamedComputation, gone: set[int]) -> set[int]:
    """Unused results that may go: those of pure ops; the last one only with all of a pure computation."""
    results, returned = list(fragment.results), fragment.returned
    unused = [i for i in range(len(results)) if i not in gone and ir.is_unused(results[i])]
    if len(gone) + len(unused) == len(results) and ir.is_side_effect_free(fragment):
        return set(unused)
    pure = {i for i in unused if (op := ir.producer(returned[i])) is None or ir.is_side_effect_free(op)}
    if pure and len(gone) + len(pure) == len(results):
        pure.discard(min(pure))
    return pure

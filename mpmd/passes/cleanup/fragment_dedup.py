"""mpmd-fragment-dedup."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass


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

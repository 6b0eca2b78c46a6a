"""mpmd-simplify-program."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.simplifying import simplify


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
                again |= simplify(fragment)

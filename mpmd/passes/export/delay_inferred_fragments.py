"""mpmd-delay-inferred-fragments."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.block_order import in_block_order


class DelayInferredFragments(FunctionPass):
    """Moves each inferred fragment to right before its first user.

    Import leaves inferred fragments at any position.  Run as late as possible they delay no user
    fragment, and their results have the shortest live ranges.

        i = m1[] (a) {...}                 g = m1["g"] (b) {...}
        g = m1["g"] (b) {...}      ->      i = m1[] (a) {...}
        f = m1["f"] (i) {...}              f = m1["f"] (i) {...}

    Requires: the order of user fragments is final.
    Ensures: each inferred fragment with users is right before the first of them, or before other
        inferred fragments that are; unused ones stay.
    Cost: linear in uses.
    Source: openxla/shardy MPMD, `delay_inferred_fragments`.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """Last first, so that a chain of inferred fragments moves as a whole."""
        for fragment in reversed(ir.fragments(f)):
            if not fragment.is_user and not ir.is_unused(fragment):
                ir.move_before(fragment, in_block_order(ir.users(fragment))[0])

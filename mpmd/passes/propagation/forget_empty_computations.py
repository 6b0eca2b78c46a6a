"""mpmd-forget-empty-computations."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass


class ForgetEmptyComputations(FunctionPass):
    """Removes the user's names from fragments that only change shardings.

        f = m1["f"(1)] cc=0 (a) {ret a}  ->  f = m1[] by=extract_reshards (a) {ret a}

    A computation may be reduced to its arguments (the backward of an addition is, for one) and still be
    needed, if argument and result have different shardings.  Without a name it can be merged with its
    neighbours, and is reported as a reshard.

    Requires: shardings are part of types.
    Ensures: each user fragment computes something.  Cost: linear in fragments.
    Source: ours; the dialect fails with an internal error when it validates reshards.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Visits each user fragment."""
        for fragment in ir.fragments(f):
            if fragment.is_user and not ir.ops(fragment.body):
                fragment.origins = []
                fragment.stage = None
                fragment.inferred_by = ["extract_reshards"]

"""mpmd-merge-forward-with-backward."""

from __future__ import annotations

from collections.abc import Iterator

from mpmd import ir
from mpmd.passes.merge.engine import MergePass


class MergeForwardWithBackward(MergePass):
    """Merges a forward fragment with the backward fragment that follows it on its mesh and uses it.

        f = m1["f"] cc=0 (a) { x = add a a; ret x }
        b = m1["f"(1)] cc=0 (f) { y = mul f f; ret y }
        -->
        b = m1["f", "f"(1)] cc=0 (a) { x = add a a; y = mul x x; ret y }

    After scheduling this happens on the last stage of orders like 1F1B: one program for both.  The merged
    fragment has two transpose counts and is no longer a scheduling unit.  Fragments of two stages stay two.

    Requires: fragments are in their final order; stages are verified.  Ensures: values are defined before
        they are used.  Cost: linear.  Source: openxla/shardy MPMD, `merge_forward_with_backward`.
    """

    def allows(self, producer: ir.Fragment, consumer: ir.Fragment) -> bool:
        """Forward, then backward, of one stage where both have one."""
        stages_agree = producer.stage == consumer.stage or None in (producer.stage, consumer.stage)
        return producer.is_forward and consumer.is_backward and stages_agree

    def candidate(self, producer: ir.Fragment, following: Iterator[ir.Fragment]) -> ir.Fragment | None:
        """The closest user, if no other fragment of the mesh is between."""
        closest = super().candidate(producer, following)
        return closest if closest is not None and closest == next(following, None) else None

"""Passes that merge named fragments."""

from __future__ import annotations

from collections.abc import Iterator

from mpmd import ir
from mpmd.passes.merge.visit import MergePass, named
from mpmd.support import diagnostics


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


class MergeUserFragmentsIntoSchedulingUnits(MergePass):
    """Merges the named fragments of a mesh that are one microbatch's forward, or backward, work.

        f = m1["f"] cc=0 (a) { x = add a a; ret x }
        g = m1["g"] cc=0 (f) { y = neg f; ret y }
        -->
        g = m1["f", "g"] cc=0 (a) { x = add a a; y = neg x; ret y }

    Merged are a fragment and its closest fragment user if both are named, equally often transposed, and of
    one microbatch and stage where both have one.

    Attributes:
        merge_siblings: merge also independent fragments, such as two encoders, of one stage and microbatch: a
            fragment and the nearest named one after it.

    Requires: neither of two such fragments has several transpose counts (error).
    Ensures: values are defined before they are used.  Cost: linear.
    Source: openxla/shardy MPMD, `merge_user_fragments_into_scheduling_units`; the option is ours.
    """

    merge_siblings: bool = False

    def candidate(self, producer: ir.Fragment, following: Iterator[ir.Fragment]) -> ir.Fragment | None:
        """The closest user, or the nearest sibling."""
        found = super().candidate(producer, following)
        if found is not None or not self.merge_siblings or not producer.is_user or producer.stage is None:
            return found
        behind = next((other for other in following if other.is_user), None)
        return behind if behind is not None and _is_sibling(producer, behind) else None

    def allows(self, producer: ir.Fragment, consumer: ir.Fragment) -> bool:
        """Both named, of one phase, microbatch and stage."""
        if not (producer.is_user and consumer.is_user):
            return False
        mixed = [op for op in (producer, consumer) if op.transpose_count is None]
        for op in mixed:
            diagnostics.error(
                f"{named(op)}: its parts were transposed a different number of times, so that it is neither "
                "forward nor backward work.  Merge forward with backward after scheduling only",
                op.location,
            )
        return (
            not mixed
            and producer.transpose_count == consumer.transpose_count
            and _agree(producer.call_counter, consumer.call_counter)
            and _agree(producer.stage, consumer.stage)
        )


def _is_sibling(a: ir.Fragment, b: ir.Fragment) -> bool:
    """Whether two named fragments are of one phase of one microbatch and stage."""
    phase = a.transpose_count
    return (
        phase is not None
        and phase == b.transpose_count
        and a.call_counter == b.call_counter
        and a.stage == b.stage
        and a.is_remat == b.is_remat
    )


def _agree(a: int | None, b: int | None) -> bool:
    return a == b or a is None or b is None

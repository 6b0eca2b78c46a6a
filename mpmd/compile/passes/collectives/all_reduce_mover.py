"""hlo-all-reduce-mover."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import only_user


class AllReduceMover(ComputationPass):
    """Moves reshapes and transposes before all-reduces, so that they fuse with the producer.

    transpose(all-reduce(x))  ->  all-reduce(transpose(x))

    The gradient of a weight is a product, a sum over devices, and a transpose: moved before the sum, the
    transpose costs nothing, as a product writes its result in any order.

    Requires: no schedule; all-reduces are not combined yet.
    Ensures: no reshape or transpose is the only user of an all-reduce of one array.
    Cost: linear in instructions and moves.
    Source: XLA has reshapes of all-gathers moved likewise; the case of all-reduces is ours.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"reshape": (_move,), "transpose": (_move,)}, lambda i: True)


def _move(site: RewriteSite) -> HloInstruction | None:
    reduced = site.operands[0]
    if reduced.opcode != "all-reduce" or len(reduced.operands) != 1 or only_user(reduced) is not site.at:
        return None
    if reduced.has_control_edges or site.shape.dynamic:
        return None
    moved = site.same(reduced.operands[0], shape=site.shape)
    return site.build.like(reduced, (moved,), site.shape)

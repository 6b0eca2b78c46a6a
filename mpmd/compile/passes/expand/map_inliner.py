"""hlo-map-inliner."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.pointwise import applied, is_inlinable
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class MapInliner(ComputationPass):
    """Applies the operations of a map to whole arrays.

    map(x, y), to_apply=(a, b) -> add(a, negate(b))  ->  add(x, negate(y))

    Requires: no schedule; calls are inlined.
    Ensures: no map is left whose computation is elementwise.
    Cost: linear.
    Source: an elementwise operation is the same on arrays as on their elements.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"map": (_inline,)}, lambda i: True)


def _inline(site: RewriteSite) -> HloInstruction | None:
    body = site.at.to_apply
    if not is_inlinable(body) or body.root.shape.is_tuple:
        return None
    (value,) = applied(site.build, body, site.operands)
    return value

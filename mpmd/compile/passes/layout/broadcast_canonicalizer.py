"""hlo-broadcast-canonicalizer."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class BroadcastCanonicalizer(ComputationPass):
    """Canonicalises broadcasts to keep the order of dims.

    broadcast(x: [2,3]), dimensions={2,0}  ->  broadcast(transpose(x): [3,2]), dimensions={0,2}

    Requires: no schedule.
    Ensures: the dimensions of each broadcast ascend.
    Cost: linear.
    Source: XLA's broadcast canonicaliser: emitters then handle one order only.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"broadcast": (_sorted,)}, lambda i: not i.shape.dynamic)


def _sorted(site: RewriteSite) -> HloInstruction | None:
    dims = site.at.dimensions
    if list(dims) == sorted(dims):
        return None
    order = sorted(range(len(dims)), key=dims.__getitem__)
    value = site.build.transpose(site.operands[0], order)
    return site.build.broadcast(value, site.shape.dims, sorted(dims))

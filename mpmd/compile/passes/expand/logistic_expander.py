"""hlo-logistic-expander."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


@dataclasses.dataclass(frozen=True)
class LogisticExpander(ComputationPass):
    """Computes the logistic function from an exponential.

    logistic(x) -> 1 / (1 + exp(-x))

    Requires: no schedule.
    Ensures: no logistic is left.
    Cost: linear.
    Source: its definition; for large -x the exponential is infinite and the quotient 0, as it should be.
    """

    name = "hlo-logistic-expander"

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"logistic": (_expand,)}, lambda i: True)


def _expand(site: RewriteSite) -> HloInstruction:
    build = site.build
    one = build.full(1, site.shape.dtype, site.shape.dims)
    power = build.add("exponential", build.add("negate", site.operands[0]))
    return build.add("divide", one, build.add("add", one, power))

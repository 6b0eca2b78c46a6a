"""hlo-stochastic-convert-expander."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.formulas import Number
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class StochasticConvertExpander(ComputationPass):
    """Rounds away from zero where random bits are below the fraction.

    stochastic-convert(x: f32, bits: u32) to s8
      -> convert(select(bits < |x - trunc(x)| * 2^32, trunc(x) + sign(x), x)) to s8

    Infinities and NaN have no fraction: they convert as usual.

    Requires: no schedule.
    Ensures: no stochastic-convert to integers is left.
    Cost: linear.
    Source: the definition.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"stochastic-convert": (_expand,)}, lambda i: True)


def _expand(site: RewriteSite) -> HloInstruction | None:
    given, random = site.operands
    if not site.shape.info.is_integral or random.shape.info.kind != "unsigned":
        return None
    x = Number(site.build, given).to("f64" if given.shape.dtype == "f64" else "f32")
    whole = x.is_("LT", 0).choose(x.of("ceil"), x.of("floor"))
    bound = ((x - whole).abs() * 2.0**random.shape.info.bits).to(random.shape.dtype)
    further = Number(site.build, random).is_("LT", bound)
    return further.choose(whole + x.of("sign"), x).to(site.shape.dtype).value

"""hlo-simplify-fp-conversions."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


@dataclasses.dataclass(frozen=True)
class SimplifyFpConversions(ComputationPass):
    """Keeps excess precision: drops a rounding to a narrower float that is widened again at once.

    convert(convert(x: f32) to bf16) to f32 -> x

    Requires: no schedule; the user allows results more exact than the program says.
    Ensures: no conversion of floats reads another one.
    Cost: linear.
    Source: XLA's pass of that name; not in the default order, since numbers differ from the program's.
    """

    name = "hlo-simplify-fp-conversions"

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"convert": (_drop_rounding,)}, lambda instruction: True)


def _drop_rounding(site: RewriteSite) -> HloInstruction | None:
    (inner,) = site.operands
    if inner.opcode != "convert":
        return None
    (x,) = inner.operands
    if any(s.info.kind != "float" for s in (x.shape, inner.shape, site.shape)):
        return None
    return site.build.convert(x, site.shape.dtype)

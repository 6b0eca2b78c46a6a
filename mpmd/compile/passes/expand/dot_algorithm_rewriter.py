"""hlo-dot-algorithm-rewriter."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite

_FACTORS = {"dot_bf16_bf16_f32": "bf16", "dot_f16_f16_f32": "f16"}
"""Algorithm → the type in which it multiplies."""


class DotAlgorithmRewriter(ComputationPass):
    """Rounds the factors of a product to the type in which its algorithm multiplies.

    dot(x: f32, y: bf16), algorithm=dot_bf16_bf16_f32  ->  dot(convert(x): bf16, y), the sums in f32

    The gradient of a product of bf16 with sums in f32 has a factor in f32.  Multiplied as it is, it needs
    units for f32 where there are those for bf16.

    Requires: no schedule.
    Ensures: the factors of products with such an algorithm have its type.
    Cost: linear.
    Source: XLA's dot algorithm rewriter for GPUs; StableHLO's specification of `dot_general`.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"dot": (_rounded,)}, lambda i: not i.has_control_edges)


def _rounded(site: RewriteSite) -> HloInstruction | None:
    dtype = _FACTORS.get(str(site.at.attributes.get("algorithm", "")))
    if dtype is None or all(o.shape.dtype == dtype for o in site.operands):
        return None
    return site.same(*(site.build.convert(o, dtype) for o in site.operands), shape=site.shape)

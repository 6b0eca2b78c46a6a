"""hlo-comparison-expander."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class ComparisonExpander(ComputationPass):
    """Compares floats in total order as integers.

    compare(x, y), type=TOTALORDER -> compare(order(x), order(y)), order(x) = bits(x) ^ (sign(x) & 0x7fff...)

    Requires: no schedule.
    Ensures: no comparison of floats in total order is left.
    Cost: linear.
    Source: IEEE 754 section 5.10: flipping the bits below the sign of negative numbers orders all, NaN too.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"compare": (_expand,)}, lambda i: True)


def _expand(site: RewriteSite) -> HloInstruction | None:
    info = site.operands[0].shape.info
    if site.at.attributes.get("comparison_type") != "TOTALORDER" or info.kind != "float" or info.bits < 8:
        return None
    dtype = f"s{info.bits}"
    a, b = (_ordered(site, x, dtype) for x in site.operands)
    return site.build.compare(a, b, site.at.direction)


def _ordered(site: RewriteSite, x: HloInstruction, dtype: str) -> HloInstruction:
    build = site.build
    bits = build.add("bitcast-convert", x, shape=x.shape.with_dtype(dtype))
    width = bits.shape.info.bits
    sign = build.add("shift-right-arithmetic", bits, build.full(width - 1, dtype, x.shape.dims))
    mask = build.full((1 << (width - 1)) - 1, dtype, x.shape.dims)
    return build.add("xor", bits, build.add("and", sign, mask))

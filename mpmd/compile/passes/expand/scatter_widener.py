"""hlo-scatter-widener."""

from __future__ import annotations

from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import reducer

_NARROW, _WIDE = ("bf16", "f16"), "f32"
_COMBINED = ("add", "maximum", "minimum")


class ScatterWidener(ComputationPass):
    """Combines updates of two bytes at one place in f32, and rounds once.

    scatter(x: bf16, places, u: bf16), add  ->  convert(scatter(convert(x): f32, places, convert(u): f32))

    A frequent token's gradient is the sum of many small numbers: in bf16 it stops to grow when it is some
    hundred times as large as they are.  Devices combine f32 at one place in one step, which not all do for
    two bytes.

    Requires: no schedule.
    Ensures: scatters that combine numbers of two bytes have different places for all of them.
    Cost: linear; the sums take twice the memory until they are rounded.
    Source: mixed precision training (Micikevicius et al. 2018): sums are f32.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"scatter": (_widened,)}, lambda i: not i.has_control_edges)


def _widened(site: RewriteSite) -> HloInstruction | None:
    if len(site.operands) != 3 or site.shape.dtype not in _NARROW or site.at.attributes.get("unique_indices"):
        return None
    opcode = reducer(site.at.to_apply)
    if opcode not in _COMBINED:
        return None
    x, places, updates = site.operands
    wide = [site.build.convert(a, _WIDE) for a in (x, updates)]
    combine = scalar_computation(site.at.parent.module, opcode, _WIDE)
    attributes, operands = site.at.attributes, (wide[0], places, wide[1])
    shape = wide[0].shape
    made = site.build.add("scatter", *operands, shape=shape, called=(combine,), name="", **attributes)
    return site.build.convert(made, site.shape.dtype)

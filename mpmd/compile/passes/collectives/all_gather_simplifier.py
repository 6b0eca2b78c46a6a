"""hlo-all-gather-simplifier."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.collectives.positions import own_part
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule
from mpmd.compile.passes.values import only_user


class AllGatherSimplifier(ComputationPass):
    """Gathers less: no values of which each device slices its own part, no copies, no widened values.

    dynamic-slice(all-gather(x), own part) -> x
    all-gather(broadcast(x)) -> broadcast(all-gather(x));  all-gather(convert(x)) -> convert(all-gather(x))

    Requires: no schedule.
    Ensures: none of these forms is left.
    Cost: linear; positions are computed for each device.
    Source: XLA's all-gather simplifiers and all-gather-broadcast reordering.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules: dict[str, tuple[Rule, ...]] = {
            "dynamic-slice": (_own_part,),
            "all-gather": (_of_broadcast, _of_convert),
        }
        return Rewriter(computation).run(rules, lambda i: True)


def _own_part(site: RewriteSite) -> HloInstruction | None:
    whole = site.operands[0]
    if whole.opcode != "all-gather" or len(whole.operands) != 1:
        return None
    return whole.operands[0] if own_part(site.at, whole) == whole.dimensions[0] else None


def _of_broadcast(site: RewriteSite) -> HloInstruction | None:
    if len(site.operands) != 1 or site.operands[0].opcode != "broadcast":
        return None
    wide = site.operands[0]
    (x,) = wide.operands
    (dim,) = site.at.dimensions
    if dim not in wide.dimensions or x.shape.size >= wide.shape.size or only_user(wide) is not site.at:
        return None
    place = wide.dimensions.index(dim)
    dims = [site.shape.dims[dim] if d == place else n for d, n in enumerate(x.shape.dims)]
    gathered = site.same(x, shape=x.shape.with_dims(dims), dimensions=(place,))
    return site.build.broadcast(gathered, site.shape.dims, wide.dimensions)


def _of_convert(site: RewriteSite) -> HloInstruction | None:
    if len(site.operands) != 1 or site.operands[0].opcode != "convert":
        return None
    wide = site.operands[0]
    (x,) = wide.operands
    if x.shape.info.bits >= wide.shape.info.bits or only_user(wide) is not site.at:
        return None
    gathered = site.same(x, shape=site.shape.with_dtype(x.shape.dtype))
    return site.build.convert(gathered, site.shape.dtype)

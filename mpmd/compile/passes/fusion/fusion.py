"""hlo-fusion."""

from __future__ import annotations

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.kernels.planner.plan_cache import caching_plans
from mpmd.compile.passes.fusion.grouping import Grouping, outline
from mpmd.compile.passes.fusion.merging import merge_groups
from mpmd.compile.passes.fusion.prices import Prices
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.cost.device import HOST, Device


class Fusion(HloPass):
    """Joins what one kernel can compute: each group of instructions becomes a fusion.

    e = exponential(x); s = reduce(e); ROOT q = divide(e, broadcast(s))  ->  ROOT f = fusion(x), kind=kInput

    Movement (broadcast, transpose, slice ...) is repeated wherever its result is read.  What computes is
    repeated only where that is cheaper than keeping it: a value that is needed outside of its group becomes
    one more result of it.  Reshapes become bitcasts: arrays are row-major, so they move nothing.  Matrix
    products take what follows them, then groups grow along the arrays between them, what saves most time
    first, then neighbours that read the same array join.  Two groups join only if the cost model says that
    they take no longer together; each pair that stays apart is a notice, with the reason.

    Requires: no `call`; layouts are row-major.
    Ensures: every group is one kernel, by the planner's own word.
    Cost: one trial plan per pair of groups that exchange an array.
    Source: multi-output fusion and stitching as in XLA's priority fusion and in TAO's memory-intensive
        fusions, with the planner as the judge of legality.

    Attributes:
        most: instructions in one group.
        device: what groups are priced for.
        narrow_products: a product is stored in its own type where all that follows only widens it: its
            readers widen it then, and the array is half as large.
    """

    most: int = 96
    device: Device = HOST
    narrow_products: bool = False

    @caching_plans()
    def rewrite(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff that changed something."""
        changed = False
        for computation in CallGraph(module).sequential():
            changed |= _reshapes_are_bitcasts(computation)
            grouping = Grouping(computation, self.device.limits)
            merge_groups(grouping, self.most, Prices(self.device), narrow_products=self.narrow_products)
            changed |= outline(grouping)
        return changed


def _reshapes_are_bitcasts(computation: HloComputation) -> bool:
    changed = False
    for instruction in computation:
        if instruction.opcode == "reshape":
            instruction.opcode, changed = "bitcast", True
            instruction.attributes = {}
    return changed

"""hlo-fusion."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.kernels.cost.device import HOST, Device
from mpmd.compile.kernels.planning.plan_cache import caching_plans
from mpmd.compile.passes.fusion.grouping import Grouping
from mpmd.compile.passes.fusion.merging import merge_groups
from mpmd.compile.passes.fusion.outline import outline
from mpmd.compile.passes.fusion.prices import PROJECTED, SPEED_OF_LIGHT, Prices
from mpmd.compile.passes.fusion.sequential import sequential
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.errors import ConfigError


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
        multi_output: groups may have several results.
        costs: the model that prices groups: `projected` or `speed-of-light`.
        device: what it prices them for.
    """

    most: int = 96
    multi_output: bool = True
    costs: str = PROJECTED
    device: Device = HOST

    def __post_init__(self) -> None:
        if self.costs not in (PROJECTED, SPEED_OF_LIGHT):
            raise ConfigError(
                f"option costs of {self.name} is {self.costs!r}\n  it is {PROJECTED!r} or {SPEED_OF_LIGHT!r}"
            )

    @caching_plans()
    def rewrite(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff that changed something."""
        changed = False
        for computation in sequential(module):
            changed |= _reshapes_are_bitcasts(computation)
            grouping = Grouping(computation)
            merge_groups(grouping, self.most, self.multi_output, Prices(self.device, self.costs))
            changed |= outline(grouping)
        return changed


def _reshapes_are_bitcasts(computation: HloComputation) -> bool:
    changed = False
    for instruction in computation:
        if instruction.opcode == "reshape":
            instruction.opcode, changed = "bitcast", True
            instruction.attributes = {}
    return changed

"""hlo-all-gather-combiner."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.passes.collectives.combining import combine
from mpmd.compile.passes.hlo_pass import ComputationPass


@dataclasses.dataclass(frozen=True)
class AllGatherCombiner(ComputationPass):
    """Gathers several arrays from devices at once.

    all-gather(x); all-gather(y)  ->  (x', y') = all-gather(x, y)

    Requires: no schedule.
    Ensures: all-gathers that agree in groups, type and attributes and do not need each other are
        one, up to the limits; the order of what is left is the same on all devices.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's combiner of that name.

    Attributes:
        most_bytes: largest sum of operands, in bytes per device.
        most_operands: most operands of one collective.
    """

    name = "hlo-all-gather-combiner"
    most_bytes: int = 30 << 20
    most_operands: int = 256

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return combine(computation, "all-gather", self.most_bytes, self.most_operands)

"""hlo-collective-permute-combiner."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.passes.collectives.combining import combine
from mpmd.compile.passes.hlo_pass import ComputationPass


@dataclasses.dataclass(frozen=True)
class CollectivePermuteCombiner(ComputationPass):
    """Sends several arrays along the same pairs at once.

    collective-permute(x); collective-permute(y)  ->  (x', y') = collective-permute(x, y)

    Requires: no schedule.
    Ensures: collective-permutes that agree in groups, type and attributes and do not need each other are
        one, up to the limits; the order of what is left is the same on all devices.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's combiner of that name.

    Attributes:
        most_bytes: largest sum of operands, in bytes per device.
        most_operands: most operands of one collective.
    """

    name = "hlo-collective-permute-combiner"
    most_bytes: int = 30 << 20
    most_operands: int = 256

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return combine(computation, "collective-permute", self.most_bytes, self.most_operands)

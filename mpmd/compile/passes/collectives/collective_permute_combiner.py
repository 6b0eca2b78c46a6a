"""hlo-collective-permute-combiner."""

from __future__ import annotations

from mpmd.compile.passes.collectives.combining import Combiner


class CollectivePermuteCombiner(Combiner):
    """Sends several arrays along the same pairs at once.

    collective-permute(x); collective-permute(y)  ->  (x', y') = collective-permute(x, y)

    Requires: no schedule.
    Ensures: collective-permutes that agree in groups, type and attributes and do not need each other are
        one, up to the limits; the order of the other collectives is the same on all devices.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's combiner of that name.
    """

    opcode = "collective-permute"

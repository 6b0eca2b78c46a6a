"""hlo-all-gather-combiner."""

from __future__ import annotations

from mpmd.compile.passes.collectives.combining import Combiner


class AllGatherCombiner(Combiner):
    """Gathers several arrays from devices at once.

    all-gather(x); all-gather(y)  ->  (x', y') = all-gather(x, y)

    Requires: no schedule.
    Ensures: all-gathers that agree in groups, type and attributes and do not need each other are
        one, up to the limits; the order of the other collectives is the same on all devices.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's combiner of that name.
    """

    opcode = "all-gather"

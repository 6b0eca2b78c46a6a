"""hlo-all-reduce-combiner."""

from __future__ import annotations

from mpmd.compile.passes.collectives.combining import Combiner


class AllReduceCombiner(Combiner):
    """Reduces several arrays over devices at once.

    all-reduce(x); all-reduce(y)  ->  (x', y') = all-reduce(x, y)

    Requires: no schedule.
    Ensures: all-reduces that agree in groups, type and attributes and do not need each other are
        one, up to the limits; the order of the other collectives is the same on all devices.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's combiner of that name.
    """

    opcode = "all-reduce"

"""hlo-reduce-scatter-combiner."""

from __future__ import annotations

from mpmd.compile.passes.collectives.combining import Combiner


class ReduceScatterCombiner(Combiner):
    """Reduces and scatters several arrays at once.

    reduce-scatter(x); reduce-scatter(y)  ->  (x', y') = reduce-scatter(x, y)

    Requires: no schedule.
    Ensures: reduce-scatters that agree in groups, type and attributes and do not need each other are
        one, up to the limits; the order of the other collectives is the same on all devices.
    Cost: linear, and one reachability query per pair of candidates.
    Source: XLA's combiner of that name.
    """

    opcode = "reduce-scatter"

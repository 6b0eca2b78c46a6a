"""Passes over communication between devices."""

from __future__ import annotations

from mpmd.compile.passes.collectives.combiners import (
    AllGatherCombiner,
    AllReduceCombiner,
    ReduceScatterCombiner,
)
from mpmd.compile.passes.collectives.reductions import (
    AllReduceMover,
    AllReduceReassociate,
    ReduceScatterCreator,
)
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

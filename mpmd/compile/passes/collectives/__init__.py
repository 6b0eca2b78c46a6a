"""Passes over programs of several devices: their partitioning, and the communication between them."""

from __future__ import annotations

from mpmd.compile.passes.collectives.communication import (
    AllGatherCombiner,
    AllReduceCombiner,
    AllReduceMover,
    AllReduceReassociate,
    ReduceScatterCombiner,
    ReduceScatterCreator,
)
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

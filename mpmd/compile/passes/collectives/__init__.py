"""Passes over communication between devices."""

from __future__ import annotations

from mpmd.compile.passes.collectives.all_gather_combiner import AllGatherCombiner
from mpmd.compile.passes.collectives.all_reduce_combiner import AllReduceCombiner
from mpmd.compile.passes.collectives.all_reduce_mover import AllReduceMover
from mpmd.compile.passes.collectives.all_reduce_reassociate import AllReduceReassociate
from mpmd.compile.passes.collectives.reduce_scatter_combiner import ReduceScatterCombiner
from mpmd.compile.passes.collectives.reduce_scatter_creator import ReduceScatterCreator
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

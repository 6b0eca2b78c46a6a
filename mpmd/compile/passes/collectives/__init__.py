"""Passes over communication between devices."""

from __future__ import annotations

from mpmd.compile.passes.collectives.all_gather_combiner import AllGatherCombiner
from mpmd.compile.passes.collectives.all_gather_simplifier import AllGatherSimplifier
from mpmd.compile.passes.collectives.all_reduce_combiner import AllReduceCombiner
from mpmd.compile.passes.collectives.all_reduce_folder import AllReduceFolder
from mpmd.compile.passes.collectives.all_reduce_mover import AllReduceMover
from mpmd.compile.passes.collectives.all_reduce_reassociate import AllReduceReassociate
from mpmd.compile.passes.collectives.collective_permute_combiner import CollectivePermuteCombiner
from mpmd.compile.passes.collectives.collective_simplifier import CollectiveSimplifier
from mpmd.compile.passes.collectives.reduce_scatter_combiner import ReduceScatterCombiner
from mpmd.compile.passes.collectives.reduce_scatter_creator import ReduceScatterCreator
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

"""Passes over calls: loops become calls, calls become their bodies."""

from __future__ import annotations

from mpmd.passes.calls.call_inline import CallInline
from mpmd.passes.calls.carry_sums_through_calls import CarrySumsThroughCalls
from mpmd.passes.calls.erase_unused_callee_block_arguments import EraseUnusedCalleeBlockArguments
from mpmd.passes.calls.from_unroll_to_call_counter import FromUnrollToCallCounter
from mpmd.passes.calls.inline import Inline
from mpmd.passes.calls.mirror_stages import MirrorStages
from mpmd.passes.calls.sink_negligible_ops_into_call_op import SinkNegligibleOpsIntoCallOp
from mpmd.passes.calls.split_accumulators_by_mesh import SplitAccumulatorsByMesh
from mpmd.passes.calls.unroll_for_loops import UnrollForLoops
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())

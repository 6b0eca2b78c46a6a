"""Passes that merge fragments."""

from __future__ import annotations

from mpmd.passes.merge.absorb_inferred_fragments import AbsorbInferredFragments
from mpmd.passes.merge.merge_forward_with_backward import MergeForwardWithBackward
from mpmd.passes.merge.merge_inferred_by_round import MergeInferredByRound
from mpmd.passes.merge.merge_inferred_fragments import MergeInferredFragments
from mpmd.passes.merge.merge_user_fragments_into_scheduling_units import (
    MergeUserFragmentsIntoSchedulingUnits,
)
from mpmd.passes.merge.rule_based_merge import RuleBasedMerge
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())

"""Passes that split fragments in two."""

from __future__ import annotations

from mpmd.passes.split.split_and_prioritize_transfer_independent_computations import (
    SplitAndPrioritizeTransferIndependentComputations,
)
from mpmd.passes.split.split_bwd_fragments import SplitBwdFragments
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())

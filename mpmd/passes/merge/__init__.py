"""See `PASSES` for what stands here."""

from __future__ import annotations

from mpmd.passes.merge.merge_inferred_by_round import MergeInferredByRound
from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = (MergeInferredByRound,)

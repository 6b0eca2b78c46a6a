"""See `PASSES` for what stands here."""

from __future__ import annotations

from mpmd.passes.calls.split_accumulators_by_mesh import SplitAccumulatorsByMesh
from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = (SplitAccumulatorsByMesh,)

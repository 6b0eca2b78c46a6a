"""See `PASSES` for what stands here."""

from __future__ import annotations

from mpmd.passes.cleanup.recompute_cheap_residuals import RecomputeCheapResiduals
from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = (RecomputeCheapResiduals,)

"""Passes that drop, join or recompute values."""

from __future__ import annotations

from mpmd.passes.cleanup.copy_constants import CopyConstants
from mpmd.passes.cleanup.fragment_dce import FragmentDce
from mpmd.passes.cleanup.fragment_dedup import FragmentDedup
from mpmd.passes.cleanup.recompute_cheap_residuals import RecomputeCheapResiduals
from mpmd.passes.cleanup.simplify_stablehlo import SimplifyStablehlo
from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = (
    CopyConstants,
    FragmentDce,
    FragmentDedup,
    RecomputeCheapResiduals,
    SimplifyStablehlo,
)

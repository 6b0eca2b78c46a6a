"""Passes that drop, join or recompute values."""

from __future__ import annotations

from mpmd.passes.cleanup.copy_cheap_constants import CopyCheapConstants
from mpmd.passes.cleanup.copy_constants import CopyConstants
from mpmd.passes.cleanup.fragment_dce import FragmentDce
from mpmd.passes.cleanup.fragment_dedup import FragmentDedup
from mpmd.passes.cleanup.recompute_attention import RecomputeAttention
from mpmd.passes.cleanup.recompute_cheap_residuals import RecomputeCheapResiduals
from mpmd.passes.cleanup.scale_smaller_factor import ScaleSmallerFactor
from mpmd.passes.cleanup.simplify_stablehlo import SimplifyStablehlo
from mpmd.passes.cleanup.swap_transposed_dots import SwapTransposedDots
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())

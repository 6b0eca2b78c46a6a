"""Passes that form kernels: which instructions one kernel computes, and what it rounds and repeats."""

from __future__ import annotations

from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from mpmd.compile.passes.fusion.fusion import Fusion
from mpmd.compile.passes.fusion.keep_rounding import KeepRounding
from mpmd.compile.passes.fusion.sort_prefix import SortPrefix
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

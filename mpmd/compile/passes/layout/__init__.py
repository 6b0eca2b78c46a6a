"""Passes over arrays in memory: the order of their dims, and the copies that keep them apart."""

from __future__ import annotations

from mpmd.compile.passes.layout.layout_assignment import LayoutAssignment
from mpmd.compile.passes.layout.layout_normalization import (
    BroadcastCanonicalizer,
    LayoutNormalization,
    LayoutRemoval,
    ReshapeDecomposer,
)
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

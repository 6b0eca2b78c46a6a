"""Passes over the order of arrays in memory."""

from __future__ import annotations

from mpmd.compile.passes.layout.decomposition import BroadcastCanonicalizer, ReshapeDecomposer
from mpmd.compile.passes.layout.layout_assignment import LayoutAssignment
from mpmd.compile.passes.layout.layout_normalization import LayoutNormalization, LayoutRemoval
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

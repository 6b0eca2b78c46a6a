"""Passes that drop, join or recompute values."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

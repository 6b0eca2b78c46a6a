"""Passes that split fragments in two."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

"""Passes that merge fragments."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

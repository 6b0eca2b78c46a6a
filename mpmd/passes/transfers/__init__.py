"""Passes over transfers, and over the signatures of functions."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

"""Passes over calls: loops become calls, calls become their bodies."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

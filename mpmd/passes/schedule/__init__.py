"""Schedules: the order in which each mesh runs its fragments."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

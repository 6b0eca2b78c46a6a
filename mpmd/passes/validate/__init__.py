"""Passes that check the requirements of scheduling, and change nothing."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

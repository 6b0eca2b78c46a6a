"""Passes that check what a program needs before it can be scheduled, and change nothing."""

from __future__ import annotations

from mpmd.passes.validate.scheduling_units_verifier import SchedulingUnitsVerifier
from mpmd.passes.validate.verify_stage_merging import VerifyStageMerging
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())

"""Passes that check the requirements of scheduling, and change nothing."""

from __future__ import annotations

from mpmd.passes.validate.scheduling_units_verifier import SchedulingUnitsVerifier
from mpmd.passes.validate.verify_stage_merging import VerifyStageMerging
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())

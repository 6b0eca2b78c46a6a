"""The order in which instructions run."""

from __future__ import annotations

from mpmd.compile.schedule.memory_schedule import MemorySchedule
from mpmd.compile.schedule.rematerialization import Rematerialization
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)

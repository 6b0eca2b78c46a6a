"""The order in which instructions run."""

from __future__ import annotations

from mpmd.compile.schedule.depth_first import DepthFirstSchedule
from mpmd.support.passes import Pass

PASSES: tuple[type[Pass], ...] = (DepthFirstSchedule,)

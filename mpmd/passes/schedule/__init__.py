"""Schedules: the order in which each mesh runs its fragments."""

from __future__ import annotations

from mpmd.passes.schedule.order_by_tasks import OrderByTasks
from mpmd.passes.schedule.pipeline_scheduler import PipelineScheduler
from mpmd.passes.schedule.remat_fragment import RematFragment
from mpmd.passes.schedule.rule_based_schedule import RuleBasedSchedule
from mpmd.support.passes import passes_in

PASSES = passes_in(vars())

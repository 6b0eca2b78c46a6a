"""Schedules by name."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from mpmd.errors import ScheduleError
from mpmd.scheduling.schedules.gpipe import GPipe
from mpmd.scheduling.schedules.one_f_one_b import OneFOneB
from mpmd.scheduling.table import Mirror, PipelineSchedule, ScheduleTable, Shape

__all__ = ["ALIASES", "SCHEDULES", "Mirror", "PipelineSchedule", "ScheduleTable", "Shape", "get_schedule"]

_ALL: tuple[type[PipelineSchedule], ...] = (
    GPipe,
    OneFOneB,
)

SCHEDULES: dict[str, type[PipelineSchedule]] = {schedule.name: schedule for schedule in _ALL}
"""Every schedule by its one name."""

ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ONE_FWD_ONE_BWD": ("1f1b", {}),
    "GPIPE": ("gpipe", {}),
}
"""Names of the Shardy registry, for programs that come from there: our name and the options that match."""


def get_schedule(schedule: str | PipelineSchedule, **options: Any) -> PipelineSchedule:
    """The schedule with this name and these options.

    Args:
        schedule: a name in ``SCHEDULES`` or ``ALIASES``, or a schedule, returned with the options set.
        **options: the fields of the schedule.

    Raises:
        ScheduleError: the name or an option is unknown.
    """
    if isinstance(schedule, PipelineSchedule):
        return _with_options(type(schedule), options, schedule)
    if not isinstance(schedule, str):
        raise ScheduleError(
            f"a schedule is a name or a PipelineSchedule, got {schedule!r}\n  names: {', '.join(SCHEDULES)}"
        )
    name, preset = ALIASES.get(schedule, (schedule, {}))
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name.lower().replace("-", "_"), SCHEDULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ScheduleError(f"there is no schedule {schedule!r}{hint}\n  schedules: {', '.join(SCHEDULES)}")
    return _with_options(SCHEDULES[name], preset | options, None)


def _with_options(
    kind: type[PipelineSchedule], options: dict[str, Any], base: PipelineSchedule | None
) -> PipelineSchedule:
    known = [field.name for field in dataclasses.fields(kind)]
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            listed = f"  options: {', '.join(known)}" if known else "  it has no options"
            raise ScheduleError(f"schedule {kind.name!r} has no option {option!r}{hint}\n{listed}")
    return kind(**options) if base is None else dataclasses.replace(base, **options)

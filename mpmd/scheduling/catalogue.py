"""Schedules by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpmd.errors import ScheduleError, close_to
from mpmd.scheduling.definition import PipelineSchedule
from mpmd.scheduling.schedules.gpipe import Circular, ForwardOnly, GPipe, LoopedBFS
from mpmd.scheduling.schedules.one_f_one_b import CombinedOneFOneB, EagerOneFOneB, Interleaved1F1B, OneFOneB
from mpmd.scheduling.schedules.two_ways import DualPipe, DualPipeV, VHalf, VMin, ZeroBubbleV
from mpmd.scheduling.schedules.user import FixedSchedule, from_csv, from_function, from_table  # noqa: F401
from mpmd.scheduling.schedules.zero_bubble import InterleavedZeroBubble, ZeroBubbleH1, ZeroBubbleH2
from mpmd.scheduling.table import ScheduleTable
from mpmd.support.other_libraries import GUIDE, schedule_elsewhere

_ALL: tuple[type[PipelineSchedule], ...] = (
    GPipe,
    OneFOneB,
    EagerOneFOneB,
    CombinedOneFOneB,
    Interleaved1F1B,
    LoopedBFS,
    Circular,
    ZeroBubbleH1,
    ZeroBubbleH2,
    InterleavedZeroBubble,
    ZeroBubbleV,
    VHalf,
    VMin,
    DualPipeV,
    DualPipe,
    ForwardOnly,
)

SCHEDULES: dict[str, type[PipelineSchedule]] = {schedule.name: schedule for schedule in _ALL}
"""Every schedule by its one name."""

ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ONE_FWD_ONE_BWD": ("1f1b", {}),
    "GPIPE": ("gpipe", {}),
    "GPIPE_BUT_1F1B_FOR_LAST_MESH": ("gpipe", {"last_mesh_1f1b": True}),
    "ZERO_BUBBLE_H1": ("zb_h1", {}),
    "ZERO_BUBBLE_H2_ZERO_TX_LATENCY": ("zb_h2", {"latency": 0.0}),
    "ZERO_BUBBLE_H2_HALF_TX_LATENCY": ("zb_h2", {"latency": 0.5}),
    "ZERO_BUBBLE_H2_FULL_TX_LATENCY": ("zb_h2", {"latency": 1.0}),
    "CIRCULAR": ("circular", {}),
    "CIRCULAR_WITH_REVERSED_BACKWARD": ("circular", {"reversed_backward": True}),
}
"""Names in the Shardy registry, for programs from there: our name and the matching options."""


def get_schedule(schedule: str | PipelineSchedule | ScheduleTable, **options: Any) -> PipelineSchedule:
    """The schedule with this name and these options.

    Args:
        schedule: a name in ``SCHEDULES`` or ``ALIASES``; a schedule, returned with these options; or a table.
        **options: the fields of the schedule.

    Raises:
        ScheduleError: the name or an option is unknown.
    """
    if isinstance(schedule, PipelineSchedule):
        return _with_options(type(schedule), options, schedule)
    if isinstance(schedule, ScheduleTable):
        return _with_options(FixedSchedule, options, FixedSchedule(schedule))
    if not isinstance(schedule, str):
        raise ScheduleError(
            f"a schedule is a name, a PipelineSchedule or a ScheduleTable, got {schedule!r}\n"
            f"  {_elsewhere(schedule)}names: {', '.join(SCHEDULES)}; for a function of a task use "
            "from_function"
        )
    name, preset = ALIASES.get(schedule, (schedule, {}))
    if name not in SCHEDULES:
        elsewhere = _elsewhere(name)
        hint = "" if elsewhere else close_to(name.lower().replace("-", "_"), SCHEDULES)
        raise ScheduleError(
            f"there is no schedule {schedule!r}{hint}\n  {elsewhere}schedules: {', '.join(SCHEDULES)}"
        )
    return _with_options(SCHEDULES[name], preset | options, None)


def _elsewhere(given: Any) -> str:
    """A line about a name, a class or an object of another library's schedule; "" if it is none."""
    name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
    if isinstance(given, type) and issubclass(given, PipelineSchedule):
        return f"that is a class: give {name}(), or {given.name!r}\n  "
    ours = schedule_elsewhere(name)
    return f"{name} of another library is schedule={ours!r} here; {GUIDE}\n  " if ours else ""


def _with_options(
    kind: type[PipelineSchedule], options: dict[str, Any], base: PipelineSchedule | None
) -> PipelineSchedule:
    known = [field.name for field in dataclasses.fields(kind)]
    for option in options:
        if option not in known:
            listed = f"  options: {', '.join(known)}" if known else "  it has no options"
            raise ScheduleError(
                f"schedule {kind.name!r} has no option {option!r}{close_to(option, known)}\n{listed}"
            )
    try:
        return kind(**options) if base is None else dataclasses.replace(base, **options)
    except TypeError as error:
        raise ScheduleError(f"schedule {kind.name!r} cannot use the options {options}: {error}") from error

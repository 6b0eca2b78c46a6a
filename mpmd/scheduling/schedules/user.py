"""The user's own schedules: a function that ranks tasks, a table, or a CSV file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpmd.errors import ScheduleError, collect
from mpmd.scheduling.definition import PipelineSchedule, PipelineShape, checked_placement
from mpmd.scheduling.table import (
    Mirror,
    Phase,
    Placement,
    ScheduleTable,
    Sources,
    Task,
    contiguous,
    folded,
    looped,
)
from mpmd.scheduling.validate import validate

_PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "contiguous": contiguous,
    "looped": looped,
    "folded": folded,
}


@dataclass(frozen=True)
class FunctionSchedule(PipelineSchedule):
    """Every mesh runs its tasks by rising key; see ``from_function``."""

    key: Callable[[Task], Any]
    splits_backward: bool = False
    has_backward: bool = True
    default_placement: str = "contiguous"
    name: str = "from_function"

    def placement(self, num_stages: int, num_meshes: int) -> Placement:
        """As ``default_placement`` chooses."""
        return _PLACEMENTS[self.default_placement](num_stages, num_meshes)

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        """Tasks by key; equal keys by microbatch, phase and stage in the direction of the flow.

        Raises:
            ScheduleError: the keys do not compare.
        """
        backward = (Phase.I, Phase.W) if self.splits_backward else (Phase.B,)
        phases = (Phase.F, *backward) if self.has_backward else (Phase.F,)
        orders: list[list[Task]] = [[] for _ in range(shape.num_meshes)]
        for microbatch in range(shape.num_microbatches):
            for phase in phases:
                stages = range(shape.num_stages)
                for stage in reversed(stages) if phase.is_backward else stages:
                    orders[shape.placement[stage]].append(Task(stage, microbatch, phase))
        for order in orders:
            try:
                order.sort(key=self.key)
            except TypeError as error:
                raise ScheduleError(
                    f"schedule {self.name!r} cannot rank the tasks by its keys: {error}\n"
                    "  return keys of one kind for all tasks, such as tuples of numbers"
                ) from error
        return orders


def from_function(
    key: Callable[[Task], Any],
    *,
    splits_backward: bool = False,
    has_backward: bool = True,
    placement: str = "contiguous",
    name: str = "from_function",
) -> PipelineSchedule:
    """A schedule in which every mesh runs its tasks by rising key.

    ``from_function(lambda t: (t.phase is not Phase.F, t.microbatch))`` is GPipe.  A key that never ranks a
    task before one it needs cannot deadlock; the table is checked in any case.

    Args:
        key: ranks a task; anything that compares.
        splits_backward: backwards are ``I`` and ``W``.
        has_backward: False for evaluation.
        placement: the mesh of each stage if the user does not choose: ``contiguous``, ``looped`` or
            ``folded``.
        name: its name in errors and charts.

    Raises:
        ScheduleError: there is no function, or the placement is unknown; when a table is made: keys do not
            compare.
    """
    if not callable(key):
        raise ScheduleError(
            f"from_function takes a function that ranks a task, got {key!r}\n"
            "  such as: lambda task: (task.phase is not Phase.F, task.microbatch)"
        )
    if placement not in _PLACEMENTS:
        raise ScheduleError(f"there is no placement {placement!r}\n  placements: {', '.join(_PLACEMENTS)}")
    return FunctionSchedule(key, splits_backward, has_backward, placement, name)


@dataclass(frozen=True)
class FixedSchedule(PipelineSchedule):
    """One table, for the numbers of stages, meshes and microbatches it was written for."""

    fixed: ScheduleTable
    name: str = "from_table"

    @property
    def splits_backward(self) -> bool:  # type: ignore[override]
        return self.fixed.splits_backward

    @property
    def has_backward(self) -> bool:  # type: ignore[override]
        return self.fixed.has_backward

    def placement(self, num_stages: int, num_meshes: int) -> Placement:
        return self.fixed.stage_to_mesh

    def mirror(self, shape: PipelineShape) -> Mirror | None:
        return self.fixed.mirror

    def orders(self, shape: PipelineShape) -> Sequence[Sequence[Task]]:
        return self.fixed.orders

    def smallest_table(self, num_meshes: int, num_microbatches: int) -> ScheduleTable:
        """The only one that there is."""
        return self.fixed

    def table(
        self,
        num_stages: int,
        num_meshes: int,
        num_microbatches: int,
        stage_to_mesh: Sequence[int] | None = None,
        sources: Sources | None = None,
    ) -> ScheduleTable:
        """The table, if it was written for this program.

        Raises:
            ScheduleError: it was written for other numbers or another placement.
        """
        fixed = self.fixed
        wanted = (num_stages, num_meshes, num_microbatches)
        written = (fixed.num_stages, fixed.num_meshes, fixed.num_microbatches)
        if wanted != written:
            raise ScheduleError(
                f"schedule {self.name!r} does not fit the program\n"
                "  written for: {} stages, {} meshes, {} microbatches\n".format(*written)
                + "  program has: {} stages, {} meshes, {} microbatches".format(*wanted)
            )
        if stage_to_mesh is not None and tuple(stage_to_mesh) != fixed.stage_to_mesh:
            raise ScheduleError(
                f"schedule {self.name!r} puts stages on other meshes than the program\n"
                f"  schedule: {list(fixed.stage_to_mesh)}\n  program:  {list(stage_to_mesh)}"
            )
        return fixed if sources is None else dataclasses.replace(fixed, sources=sources)


def from_table(
    orders: Sequence[Sequence[Task | str]],
    stage_to_mesh: Sequence[int] | None = None,
    *,
    name: str = "from_table",
) -> PipelineSchedule:
    """A schedule written out: per mesh its tasks in order, as tasks or as text such as ``0F0``.

    Args:
        orders: per mesh, its tasks.
        stage_to_mesh: the mesh of each stage; by default the mesh of its first task.
        name: its name in errors and charts.

    Raises:
        ScheduleError: names the first impossible task of each mesh, and why.
    """
    parsed = tuple(tuple(_task(t, name) for t in _listed(order, name)) for order in _listed(orders, name))
    tasks = [task for order in parsed for task in order]
    if not tasks:
        raise ScheduleError(
            f"schedule {name!r} has no tasks\n  expected: a list for each mesh, such as [['0F0', '0B0']]"
        )
    for task in tasks:
        if max(task.stage, task.microbatch) >= len(tasks):
            raise ScheduleError(
                f"schedule {name!r} has task {task}, but only {len(tasks)} tasks\n"
                "  stages and microbatches are numbered from 0 without gaps"
            )
    placement = _placement_of(parsed)
    if stage_to_mesh is not None:
        placement = checked_placement(stage_to_mesh, len(placement), len(parsed))
    splits = any(task.phase is Phase.I for task in tasks)
    has_backward = any(task.phase.is_backward for task in tasks)
    table = ScheduleTable(parsed, placement, splits, has_backward)
    validate(table)
    return FixedSchedule(table, name)


def _listed(tasks: Any, name: str) -> Sequence[Any]:
    if isinstance(tasks, str) or not isinstance(tasks, Sequence):
        raise ScheduleError(
            f"schedule {name!r} has {tasks!r}; it must list the tasks of each mesh: [['0F0', '0B0'], ...]"
        )
    return tasks


def _task(task: Any, name: str) -> Task:
    if isinstance(task, str):
        return Task.parse(task)
    if not isinstance(task, Task):
        raise ScheduleError(f"schedule {name!r} has {task!r}, which is not a task; write one as '0F0'")
    return task


def _placement_of(orders: Sequence[Sequence[Task]]) -> Placement:
    mesh_of: dict[int, int] = {}
    for mesh, order in enumerate(orders):
        for task in order:
            mesh_of.setdefault(task.stage, mesh)
    stages = 1 + max(mesh_of, default=-1)
    absent = [stage for stage in range(stages) if stage not in mesh_of]
    if absent:
        raise ScheduleError(
            f"stage {absent[0]} has no tasks, but stage {stages - 1} has\n"
            "  stages are numbered from 0 without gaps"
        )
    return tuple(mesh_of[stage] for stage in range(stages))


def from_csv(path_or_text: str | Path) -> PipelineSchedule:
    """A schedule from CSV: one line per mesh, tasks such as ``0F0,0F1,1B0``; empty cells are skipped.

    Args:
        path_or_text: a file, or the text itself, which has a comma or several lines.

    Raises:
        ScheduleError: the file cannot be read, a cell is not a task, or a task is impossible.
    """
    if not isinstance(path_or_text, (str, Path)):
        raise ScheduleError(f"from_csv takes the path of a file, or its text, got {path_or_text!r}")
    is_text = isinstance(path_or_text, str) and re.search(r"[,\n]", path_or_text) is not None
    source = "from_csv" if is_text else str(path_or_text)
    if is_text:
        text = str(path_or_text)
    else:
        try:
            text = Path(path_or_text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # not UTF-8, or not a path
            raise ScheduleError(
                f"the schedule {source!r} cannot be read: {error}\n"
                "  give the path of a file, or the text itself, which has a comma or several lines"
            ) from error
    orders: list[list[Task]] = []
    problems: list[str] = []
    for number, line in enumerate(text.strip("\n").split("\n"), 1):
        orders.append([])
        for column, cell in enumerate(line.split(","), 1):
            if cell.strip():
                try:
                    orders[-1].append(Task.parse(cell))
                except ScheduleError as error:
                    problems.append(f"line {number}, cell {column}: {error}")
    if problems:
        raise collect(ScheduleError, problems[:8], f"{len(problems)} cells of {source!r} are not tasks:")
    return from_table(orders, name=source)

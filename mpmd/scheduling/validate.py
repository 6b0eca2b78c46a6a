"""Verifies that a table can run: one legal order of all tasks, or the first impossible task."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.errors import ScheduleError, collect
from mpmd.scheduling.table import Phase, ScheduleTable, Task

_MAX_PROBLEMS = 8


def validate(table: ScheduleTable, num_microbatches: int | None = None) -> list[Task]:
    """Proves that a table can run: every task once, on its mesh, and no deadlock.

    Meshes run their tasks in order and without branches, so whether a step ends does not depend on timing:
    it ends always, or never.  It ends exactly if the order within meshes and the flow of data between tasks
    have no cycle.

    Args:
        table: the table.
        num_microbatches: how many there must be; by default one more than the largest that occurs.

    Returns:
        One order of all tasks that respects both, the same in every process: the certificate.

    Raises:
        ScheduleError: names the first impossible task of each mesh and why it is impossible.
    """
    expected = table.num_microbatches if num_microbatches is None else num_microbatches
    problems = _membership_problems(table, expected)
    if not problems:
        problems = _missing_problems(table, expected)
    if problems:
        raise collect(ScheduleError, problems[:_MAX_PROBLEMS], f"{len(problems)} problems in the schedule:")
    return linearize(table)


def linearize(table: ScheduleTable) -> list[Task]:
    """One order of all tasks that respects the order of each mesh and the flow of data.

    Cost: linear in the tasks.

    Raises:
        ScheduleError: there is none; spells out a cycle of tasks that wait for each other.
    """
    at = [0] * table.num_meshes
    done: set[Task] = set()
    waiting: dict[Task, list[int]] = {}
    order: list[Task] = []
    runnable = list(range(table.num_meshes - 1, -1, -1))
    while runnable:
        mesh = runnable.pop()
        tasks = table.orders[mesh]
        while at[mesh] < len(tasks):
            task = tasks[at[mesh]]
            missing = next((d for d in table.dependencies(task) if d not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(mesh)
                break
            done.add(task)
            order.append(task)
            at[mesh] += 1
            runnable += waiting.pop(task, ())
    if any(k < len(tasks) for k, tasks in zip(at, table.orders, strict=True)):
        raise ScheduleError(_deadlock_message(table, at, done))
    return order


def _membership_problems(table: ScheduleTable, num_microbatches: int) -> list[str]:
    problems = []
    seen: dict[Task, tuple[int, int]] = {}
    for mesh, order in enumerate(table.orders):
        for position, task in enumerate(order):
            where = f"task {task}, number {position} on mesh {mesh}"
            if not task.stage < table.num_stages:
                problems.append(
                    f"{where}: there is no stage {task.stage}; the stages are 0 to {table.num_stages - 1}"
                )
            elif not task.microbatch < num_microbatches:
                problems.append(
                    f"{where}: there is no microbatch {task.microbatch}; "
                    f"the microbatches are 0 to {num_microbatches - 1}"
                )
            elif table.mesh_of(task) != mesh:
                problems.append(f"{where}: stage {task.stage} is on mesh {table.mesh_of(task)}")
            elif task in seen:
                problems.append(f"{where}: it is already at number {seen[task][1]}")
            elif task.phase.is_backward and not table.has_backward:
                problems.append(f"{where}: the schedule is forward only")
            elif _split_twin(task, seen):
                problems.append(
                    f"{where}: {_split_twin(task, seen)} is there as well; a backward is either B, or I and W"
                )
            seen.setdefault(task, (mesh, position))
    return problems


def _split_twin(task: Task, seen: dict[Task, tuple[int, int]]) -> Task | None:
    """A task that is already there and would compute the same gradient."""
    others = {Phase.B: (Phase.I, Phase.W), Phase.I: (Phase.B,), Phase.W: (Phase.B,)}.get(task.phase, ())
    twins = (Task(task.stage, task.microbatch, phase) for phase in others)
    return next((twin for twin in twins if twin in seen), None)


def _missing_problems(table: ScheduleTable, num_microbatches: int) -> list[str]:
    present = set(table.tasks())
    problems = []
    for stage in range(table.num_stages):
        for microbatch in range(num_microbatches):
            for phase in (Phase.F, *table.backward_phases(stage, microbatch)):
                task = Task(stage, microbatch, phase)
                if task not in present:
                    problems.append(f"task {task} is missing; it belongs on mesh {table.mesh_of(task)}")
    return problems


def _deadlock_message(table: ScheduleTable, at: Sequence[int], done: set[Task]) -> str:
    """Follows the waits of the first stuck mesh until a mesh repeats: that is the cycle."""
    mesh = next(m for m, k in enumerate(at) if k < len(table.orders[m]))
    path: list[int] = []
    needs: dict[int, tuple[Task, Task]] = {}
    while mesh not in needs:
        path.append(mesh)
        task = table.orders[mesh][at[mesh]]
        missing = next(d for d in table.dependencies(task) if d not in done)
        needs[mesh] = (task, missing)
        mesh = table.mesh_of(missing)
    cycle = path[path.index(mesh) :]
    first, missing = needs[cycle[0]]
    if len(cycle) == 1:
        later = table.orders[mesh].index(missing)
        return (
            f"task {first} is impossible: it needs {missing}, which comes after it on mesh {mesh}\n"
            f"  {first} is number {at[mesh]}, {missing} is number {later}; put {missing} first"
        )
    lines = [f"task {first} is impossible: the schedule deadlocks"]
    for m in cycle:
        task, missing = needs[m]
        lines.append(
            f"  mesh {m} waits at {task} (number {at[m]}), "
            f"which needs {missing} from mesh {table.mesh_of(missing)}"
        )
    lines.append("  move one of these tasks after the work that the others wait for")
    return "\n".join(lines)

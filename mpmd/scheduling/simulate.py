"""Predicts a step: when every task and transfer runs, and how much every mesh holds.

Each mesh runs one task at a time in its order; each link carries one message at a time in the order in
which the receiving mesh needs them.  Both orders are fixed, so there is nothing to decide: time is a
longest path, found in one sweep over a legal order of all tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpmd.errors import ScheduleError
from mpmd.scheduling.schedule_memory import memory_over_time
from mpmd.scheduling.table import Phase, ScheduleTable, Task
from mpmd.scheduling.task_costs import Costs, Link, Transfer, link_between
from mpmd.scheduling.timeline import IDLE, TRANSFER, Span, Timeline
from mpmd.scheduling.validate import linearize


def simulate(
    table: ScheduleTable,
    costs: Costs | None = None,
    transfer: Transfer = Link(),  # noqa: B008  (immutable)
    *,
    host_s: float = 0.0,
    mesh_names: Sequence[str] | None = None,
    title: str = "",
) -> Timeline:
    """Start and end of every task and transfer of one step, why meshes idle, and bytes over time.

    Args:
        table: the schedule; must be legal.
        costs: seconds and bytes per stage; by default unit costs.
        transfer: the link between any two meshes, or one per pair; by default instant.
        host_s: seconds the host needs to enqueue one task or receive; it runs ahead of the mesh.
        mesh_names: per mesh index; by default ``mesh0``, ``mesh1``, ...
        title: of the timeline.

    Raises:
        ScheduleError: the table deadlocks, or costs do not fit it.
    """
    costs = Costs.unit(table.num_stages) if costs is None else costs
    if len(costs.stages) != table.num_stages:
        raise ScheduleError(
            f"costs are given for {len(costs.stages)} stages, the schedule has {table.num_stages}\n"
            f"  if all cost the same: Costs.uniform({table.num_stages}, StageCosts(...))"
        )
    names = tuple(f"mesh{m}" for m in range(table.num_meshes)) if mesh_names is None else tuple(mesh_names)
    if len(names) != table.num_meshes:
        raise ScheduleError(f"{len(names)} mesh names are given, the schedule has {table.num_meshes} meshes")
    sweep = _ClockSweep(table, costs, transfer, host_s, names)
    for task in linearize(table):
        sweep.run(task)
    sweep.finish()
    memory = memory_over_time(table, costs, sweep.spans, sweep.transfers, names)
    spans = (*sweep.spans.values(), *(span for _, _, span in sweep.transfers), *sweep.idle)
    return Timeline(tuple(spans), names, title, memory, in_steps=costs == Costs.unit(table.num_stages))


def messages(table: ScheduleTable, costs: Costs, task: Task) -> list[Task]:
    """The tasks that a task depends on, those over skip connections included."""
    needed = list(table.dependencies(task))
    for skip in costs.skips:
        if task.phase is Phase.F and task.stage == skip.target:
            needed.append(Task(skip.source, task.microbatch, Phase.F))
        if task.phase.sends_gradient and task.stage == skip.source:
            needed.append(
                Task(skip.target, task.microbatch, table.backward_phases(skip.target, task.microbatch)[0])
            )
    return needed


@dataclass
class _ClockSweep:
    """The clocks of meshes and links during the sweep."""

    table: ScheduleTable
    costs: Costs
    transfer: Transfer
    host_s: float
    names: tuple[str, ...]
    spans: dict[Task, Span] = field(default_factory=dict)
    transfers: list[tuple[Task, Task, Span]] = field(default_factory=list)
    idle: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = [0.0] * self.table.num_meshes
        self.host = [0.0] * self.table.num_meshes
        self.link_free: dict[tuple[int, int], float] = {}

    def run(self, task: Task) -> None:
        mesh = self.table.mesh_of(task)
        ready, reason = 0.0, ""
        for source in messages(self.table, self.costs, task):
            origin = self.table.mesh_of(source)
            if origin == mesh:
                at, why = self.spans[source].end_s, f"waits for {source} on its own mesh"
            else:
                at, why = self._receive(source, task, origin, mesh)
            if at > ready:
                ready, reason = at, why
        self.host[mesh] += self.host_s
        if self.host[mesh] > ready:
            ready, reason = self.host[mesh], "waits for the host to enqueue it"
        start = max(self.device[mesh], ready)
        if start > self.device[mesh]:
            self._idle(mesh, start, f"{task} {reason}")
        end = self.device[mesh] = start + self.costs.seconds(task)
        self.spans[task] = Span(self.names[mesh], str(task), task, start, end)

    def _receive(self, source: Task, target: Task, origin: int, mesh: int) -> tuple[float, str]:
        """The transfer between two tasks: when its value is usable, and a message for the waiting task."""
        link = link_between(self.transfer, origin, mesh)
        size = self.costs.message_bytes(source, target)
        self.host[mesh] += self.host_s
        offered = self.spans[source].end_s
        begin = max(self.host[mesh], offered, self.link_free.get((origin, mesh), 0.0))
        free = self.link_free[origin, mesh] = begin + link.wire_s(size)
        arrived = free + link.latency_s
        span = Span(
            self.names[origin], f"{source} to {self.names[mesh]}", source, begin, arrived, TRANSFER,
            peer=self.names[mesh], nbytes=size,
        )  # fmt: skip
        self.transfers.append((source, target, span))
        if begin > offered:
            return arrived, f"waits for {source} from {self.names[origin]}: the link is busy"
        if arrived > begin and self.device[mesh] >= offered:
            return arrived, f"waits for the transfer of {source} from {self.names[origin]}"
        return arrived, f"waits for {source} on {self.names[origin]}"

    def _idle(self, mesh: int, until: float, note: str) -> None:
        self.idle.append(Span(self.names[mesh], "idle", None, self.device[mesh], until, IDLE, note=note))

    def finish(self) -> None:
        """Adds the idle time at the end of meshes that finish early."""
        last = max(self.device, default=0.0)
        for mesh, end in enumerate(self.device):
            if end < last:
                self._idle(mesh, last, "has done its part of the step")

"""Predicts a step: when every task and transfer runs, and how much every mesh holds.

Each mesh runs one task at a time in its order; each link carries one message at a time in the order in
which the receiving mesh needs them.  Both orders are fixed, so there is nothing to decide: time is a
longest path, found in one sweep over a legal order of all tasks.

A mesh holds bytes in categories: parameters and their gradients, residuals, activations, and more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpmd.errors import ScheduleError
from mpmd.scheduling.table import Phase, ScheduleTable, Task
from mpmd.scheduling.task_costs import Costs, Link, Transfer, link_between
from mpmd.scheduling.timeline import IDLE, TRANSFER, MemoryCurve, Span, Timeline
from mpmd.scheduling.validate import linearize

CATEGORIES = ("parameters", "gradients", "residuals", "activations", "workspace", "batch")


def peak_activations(table: ScheduleTable) -> tuple[int, ...]:
    """Per mesh, the most (stage, microbatch) pairs between forward and the end of the backward.

    Depends on the order alone.  A pair ends with ``B`` or ``W``; without backward, with its ``F``.  Divide
    by the stages of a mesh to count microbatches.
    """
    peaks = []
    for order in table.orders:
        held = peak = 0
        for task in order:
            if task.phase is Phase.F:
                held += 1
                peak = max(peak, held)
            if task.phase in (Phase.B, Phase.W) or not table.backward_phases(task.stage, task.microbatch):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


def memory_over_time(
    table: ScheduleTable,
    costs: Costs,
    spans: Mapping[Task, Span],
    transfers: Sequence[tuple[Task, Task, Span]],
    mesh_names: Sequence[str],
) -> tuple[MemoryCurve, ...]:
    """Bytes of every mesh at every change.

    A result lives from the start of the task that produces it.  A sent value lives on the sending mesh until
    the last of its transfers has ended, and on the receiving mesh from the start of the transfer to the end
    of the task that needs it.  Residuals live to the end of ``B``, or of ``W``.

    Args:
        table: the schedule.
        costs: sizes.
        spans: when each task ran.
        transfers: (task that sends, task that receives, when).
        mesh_names: per mesh index.
    """
    ledgers = [_Ledger() for _ in table.orders]
    _add_tasks(table, costs, spans, ledgers)
    released: dict[tuple[Task, int], float] = {}
    for source, target, span in transfers:
        size = costs.message_bytes(source, target)
        key = (source, size)
        released[key] = max(released.get(key, 0.0), span.end_s)
        ledgers[table.mesh_of(target)].hold("activations", size, span.start_s, spans[target].end_s)
    for (source, size), end in released.items():
        ledgers[table.mesh_of(source)].hold("activations", size, spans[source].start_s, end)
    peaks = peak_activations(table)
    return tuple(
        MemoryCurve(name, CATEGORIES, ledger.samples(), peak)
        for name, ledger, peak in zip(mesh_names, ledgers, peaks, strict=True)
    )


class _Ledger:
    """Changes of the bytes held on one mesh."""

    def __init__(self) -> None:
        self.changes: list[tuple[float, int, int, int]] = []  # seconds, frees first, category, bytes

    def hold(self, category: str, nbytes: int, start_s: float, end_s: float | None) -> None:
        if nbytes and start_s != end_s:
            k = CATEGORIES.index(category)
            self.changes.append((start_s, 1, k, nbytes))
            if end_s is not None:
                self.changes.append((end_s, 0, k, -nbytes))

    def samples(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        held = [0] * len(CATEGORIES)
        samples: list[tuple[float, tuple[int, ...]]] = [(0.0, tuple(held))]
        for seconds, allocates, category, nbytes in sorted(self.changes):
            held[category] += nbytes
            if samples[-1][0] == seconds and (allocates or len(samples) == 1):
                samples[-1] = (seconds, tuple(held))
            elif samples[-1][1] != tuple(held):
                samples.append((seconds, tuple(held)))
        return tuple(samples)


def _last_end(table: ScheduleTable, spans: Mapping[Task, Span], forward: Task) -> float:
    """When the last task of a stage and a microbatch ends."""
    stage, microbatch = forward.stage, forward.microbatch
    phases = table.backward_phases(stage, microbatch) or (Phase.F,)
    return max(spans[Task(stage, microbatch, phase)].end_s for phase in phases)


def _add_tasks(
    table: ScheduleTable, costs: Costs, spans: Mapping[Task, Span], ledgers: Sequence[_Ledger]
) -> None:
    """Everything but messages between meshes; a task passes bytes to the next stage on its own mesh, too."""
    first_backward: dict[tuple[int, int], float] = {}
    begun = [min((spans[task].end_s for task in order), default=0.0) for order in table.orders]
    for mesh, order in enumerate(table.orders):
        hold = ledgers[mesh].hold
        for task in order:
            stage, span = costs.stages[task.stage], spans[task]
            hold("workspace", stage.workspace_bytes, span.start_s, span.end_s)
            if task.phase in (Phase.B, Phase.W):
                first_backward.setdefault((task.stage, mesh), span.start_s)
            for source in table.dependencies(task):
                if source.stage != task.stage and table.mesh_of(source) == mesh:
                    hold("activations", costs.message_bytes(source, task), spans[source].start_s, span.end_s)
            if task.phase is Phase.F:
                hold("batch", stage.batch_bytes, 0.0, begun[mesh])
                hold("batch", stage.batch_bytes, 0.0, _last_end(table, spans, task))
            phases = table.backward_phases(task.stage, task.microbatch)
            if task.phase is Phase.F and phases:
                ends = [spans[Task(task.stage, task.microbatch, phase)].end_s for phase in phases]
                hold("residuals", stage.residual_bytes, span.start_s, ends[0])
                if len(ends) == 2:
                    hold("residuals", stage.bytes_between_halves, ends[0], ends[1])
    for placement in (table.stage_to_mesh, table.mirror.stage_to_mesh if table.mirror else ()):
        for number, mesh in enumerate(placement):
            ledgers[mesh].hold("parameters", costs.stages[number].parameter_bytes, 0.0, None)
    for (number, mesh), start_s in first_backward.items():
        ledgers[mesh].hold("gradients", costs.stages[number].gradient_bytes, start_s, None)


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
            phases = table.backward_phases(skip.target, task.microbatch)
            needed += (Task(skip.target, task.microbatch, phase) for phase in phases[:1])
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
        self.numbers = itertools.count()

    def run(self, task: Task) -> None:
        mesh = self.table.mesh_of(task)
        ready, reason = 0.0, ""
        needs: list[int] = []
        for source in messages(self.table, self.costs, task):
            origin = self.table.mesh_of(source)
            if origin == mesh:
                at, why = self.spans[source].end_s, f"waits for {source} on its own mesh"
                needs.append(self.spans[source].number)
            else:
                at, why = self._receive(source, task, origin, mesh)
                needs.append(self.transfers[-1][2].number)
            if at > ready:
                ready, reason = at, why
        self.host[mesh] += self.host_s
        if self.host[mesh] > ready:
            ready, reason = self.host[mesh], "waits for the host to enqueue it"
        start = max(self.device[mesh], ready)
        if start > self.device[mesh]:
            self._idle(mesh, start, f"{task} {reason}")
        end = self.device[mesh] = start + self.costs.seconds(task)
        self.spans[task] = Span(
            self.names[mesh], str(task), task, start, end, number=next(self.numbers), needs=tuple(needs)
        )

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
            peer=self.names[mesh], nbytes=size, number=next(self.numbers), needs=(self.spans[source].number,),
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

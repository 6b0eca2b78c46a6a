"""Bytes that a mesh holds over time, by category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpmd.scheduling.table import Phase, ScheduleTable, Task
from mpmd.scheduling.task_costs import Costs
from mpmd.scheduling.timeline import MemoryCurve, Span

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
            if task.phase in (Phase.B, Phase.W) or not table.has_backward:
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
    phases = table.backward_phases(stage, microbatch) if table.has_backward else (Phase.F,)
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
            if task.phase is Phase.F and table.has_backward:
                phases = table.backward_phases(task.stage, task.microbatch)
                ends = [spans[Task(task.stage, task.microbatch, phase)].end_s for phase in phases]
                hold("residuals", stage.residual_bytes, span.start_s, ends[0])
                if len(ends) == 2:
                    hold("residuals", stage.bytes_between_halves, ends[0], ends[1])
    for placement in (table.stage_to_mesh, table.mirror.stage_to_mesh if table.mirror else ()):
        for number, mesh in enumerate(placement):
            ledgers[mesh].hold("parameters", costs.stages[number].parameter_bytes, 0.0, None)
    for (number, mesh), start_s in first_backward.items():
        ledgers[mesh].hold("gradients", costs.stages[number].gradient_bytes, start_s, None)

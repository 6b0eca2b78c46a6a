"""Finds a schedule for given costs and a memory limit, and how far it is from the optimum.

The optimum is not known; lower bounds of a step hold for every order of a placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpmd.brief import brief, clipped
from mpmd.errors import ScheduleError
from mpmd.scheduling.catalogue import SCHEDULES
from mpmd.scheduling.definition import PipelineSchedule, PipelineShape
from mpmd.scheduling.list_schedule import (
    Ordered,
    backward_first,
    forward_first,
    list_schedule,
    old_first,
)
from mpmd.scheduling.render import duration
from mpmd.scheduling.simulate import peak_activations, simulate
from mpmd.scheduling.table import Placement, ScheduleTable
from mpmd.scheduling.task_costs import Costs, Link, Transfer
from mpmd.scheduling.timeline import Timeline
from mpmd.scheduling.validate import validate
from mpmd.scheduling.workload import BACKWARD, FORWARD, WEIGHTS, Step, Workload, costed_workload, expand
from mpmd.support.progress import ProgressLine


@dataclass(frozen=True)
class Paths:
    """Seconds one microbatch needs without waiting, per chain.

    Attributes:
        head: before the chain's forward can start.
        tail: after the chain's backward, to the end of the step: backwards of earlier chains, then the
            remaining work of the first chain.
        life: from the start of the chain's forward to the end of its backward.
    """

    head: tuple[float, ...]
    tail: tuple[float, ...]
    life: tuple[float, ...]


def paths(workload: Workload) -> Paths:
    """The unavoidable seconds of one microbatch around each chain."""
    seconds, delays = workload.seconds, workload.delays
    head = [0.0] * len(workload.chains)
    tail = [0.0] * len(workload.chains)
    life = [0.0] * len(workload.chains)
    for index, chain in enumerate(workload.chains):  # chains of one direction follow each other
        previous = chain.previous
        if previous is None:
            tail[index] = seconds[index][WEIGHTS]
        else:
            head[index] = head[previous] + seconds[previous][FORWARD] + delays[index][FORWARD]
            back = delays[previous][BACKWARD] + seconds[previous][BACKWARD] + tail[previous]
            tail[index] = max(seconds[index][WEIGHTS], back)
    for index in reversed(range(len(workload.chains))):
        following = workload.chains[index].following
        there_and_back = 0.0
        if following is not None:
            there_and_back = delays[following][FORWARD] + life[following] + delays[index][BACKWARD]
        life[index] = seconds[index][FORWARD] + there_and_back + seconds[index][BACKWARD]
    return Paths(tuple(head), tuple(tail), tuple(life))


def lower_bound(workload: Workload, limits: Sequence[int] | None = None) -> float:
    """Seconds that no order of this workload can beat.

    The largest, over meshes, of: the work before its first forward, all its work, and the work that must
    follow; the same without weight gradients, for which no other mesh waits; one microbatch there and back;
    and, where memory is limited, the time the mesh's activations are held over the limit.

    Args:
        workload: chains with their costs.
        limits: per mesh, its memory limit; None: unlimited.
    """
    way = paths(workload)
    best = 0.0
    for mesh in range(workload.num_meshes):
        chains = workload.chains_on(mesh)
        if not chains:
            continue
        head = min(way.head[chain] for chain in chains)
        tail = min(way.tail[chain] for chain in chains)
        work = workload.work_s(mesh)
        weights = sum(workload.seconds[k][WEIGHTS] * len(workload.chains[k].microbatches) for k in chains)
        best = max(best, head + work, head + work - weights + tail)
        best = max(best, *(way.head[k] + way.life[k] + way.tail[k] for k in chains))
        if limits is not None and limits[mesh] > 0:
            held = sum(
                (way.life[k] + workload.seconds[k][WEIGHTS])
                * workload.sizes[k]
                * len(workload.chains[k].microbatches)
                for k in chains
            )
            best = max(best, head + held / limits[mesh])
    return best


_TOLERANCE = 1e-9
_PRIORITIES = (backward_first, old_first, forward_first)
_MAX_WAITS = (0.0, 0.5)


@dataclass(frozen=True)
class Candidate:
    """One schedule that was tried.

    Attributes:
        name: of the schedule or the method.
        makespan_s: predicted seconds of the step; None if it does not fit.
        problem: why it does not fit.
    """

    name: str
    makespan_s: float | None
    problem: str = ""

    __repr__ = brief


@dataclass(frozen=True)
class SearchResult:
    """The best schedule found.

    Attributes:
        table: the schedule.
        timeline: its prediction.
        origin: the schedule or method it comes from.
        bound_s: no schedule for the same placements and limits is shorter.
        candidates: all schedules that were tried, in order.
    """

    table: ScheduleTable
    timeline: Timeline
    origin: str
    bound_s: float
    candidates: tuple[Candidate, ...]

    def __repr__(self) -> str:
        return clipped(f"SearchResult of {len(self.candidates)} schedules, {self._verdict()}")

    def _repr_svg_(self) -> str:
        """Its prediction as a picture, for notebooks."""
        return self.timeline._repr_svg_()

    @property
    def makespan_s(self) -> float:
        """Predicted seconds of the step."""
        return self.timeline.makespan_s

    @property
    def gap(self) -> float:
        """Upper bound on the distance to the optimum: 0.02 is 2 percent."""
        return max(0.0, self.makespan_s / self.bound_s - 1.0) if self.bound_s else 0.0

    @property
    def proved(self) -> bool:
        return self.gap <= _TOLERANCE

    def report(self) -> str:
        lines = [
            f"{c.name:<28} {c.problem if c.makespan_s is None else duration(self.timeline, c.makespan_s)}"
            for c in self.candidates
        ]
        return "\n".join([*lines, self._verdict()]) + "\n"

    def _verdict(self) -> str:
        verdict = "optimal" if self.proved else f"at most {self.gap:.1%} longer than the best there can be"
        reached, bound = (duration(self.timeline, seconds) for seconds in (self.makespan_s, self.bound_s))
        return f"best: {self.origin}, {reached}, bound {bound}, {verdict}"


@dataclass(frozen=True)
class SchedulingProblem:
    """Input of the search.

    Attributes:
        costs: per stage.
        num_meshes: number of meshes.
        num_microbatches: number of microbatches.
        transfer: links between meshes.
        stage_to_mesh: the placement; None: the search may choose among the named schedules' placements.
        limit_bytes: per mesh, or one for all: the most bytes it may hold.
        limit_activations: per mesh, or one for all: the most stages' activations of a microbatch it may hold.
        split_backward: backwards may be two tasks.
        whole: stages whose backward is never split.
        copies: schedules that keep two copies of every stage may be chosen too.
    """

    costs: Costs
    num_meshes: int
    num_microbatches: int
    transfer: Transfer = Link()  # noqa: RUF009  (immutable)
    stage_to_mesh: Placement | None = None
    limit_bytes: int | Sequence[int] | None = None
    limit_activations: int | Sequence[int] | None = None
    split_backward: bool = True
    whole: tuple[int, ...] = ()
    copies: bool = False

    __repr__ = brief

    @property
    def num_stages(self) -> int:
        return len(self.costs.stages)

    def per_mesh(self, limit: int | Sequence[int] | None) -> tuple[int, ...] | None:
        """A limit for each mesh.

        Raises:
            ScheduleError: the limit is given for another number of meshes.
        """
        if limit is None:
            return None
        limits = (limit,) * self.num_meshes if isinstance(limit, int) else tuple(limit)
        if len(limits) != self.num_meshes:
            raise ScheduleError(
                f"memory limits are given for {len(limits)} meshes, not {self.num_meshes}\n"
                "  give one number for all meshes, or one for each, in their order"
            )
        return limits


def search(problem: SchedulingProblem) -> SearchResult:
    """The best schedule found, never worse than any named schedule that fits the same limits.

    Candidates are the named schedules, and list scheduling with the given costs.

    Args:
        problem: costs, sizes and limits.

    Raises:
        ScheduleError: nothing fits the limits; names the closest candidate.
    """
    hunt = _Hunt(problem)
    with ProgressLine("search") as progress:
        for number, (name, kind) in enumerate(SCHEDULES.items()):
            progress.show(name, number, len(SCHEDULES))
            hunt.try_named(name, kind)
        for placement in hunt.placements():
            for splits in (False, True) if problem.split_backward else (False,):
                progress.show("list schedules")
                hunt.try_list_schedules(placement, splits)
    return hunt.result()


class _Hunt:
    """Keeps the best while candidates are tried."""

    def __init__(self, problem: SchedulingProblem) -> None:
        self.problem = problem
        self.limit_bytes = problem.per_mesh(problem.limit_bytes)
        self.limit_activations = problem.per_mesh(problem.limit_activations)
        self.candidates: list[Candidate] = []
        self.best: tuple[float, str, ScheduleTable, Timeline] | None = None
        self.closest: tuple[float, str] | None = None
        self.named_placements: dict[Placement, None] = {}
        self.bounds: list[float] = []

    def placements(self) -> list[Placement]:
        """The given placement, or the named schedules' placements."""
        if self.problem.stage_to_mesh is not None:
            return [self.problem.stage_to_mesh]
        return list(self.named_placements)

    def try_named(self, name: str, kind: type[PipelineSchedule]) -> None:
        """A named schedule, if it can order this problem."""
        problem = self.problem
        if not kind.has_backward or (kind.splits_backward and not problem.split_backward):
            return
        try:
            table = kind().table(
                problem.num_stages, problem.num_meshes, problem.num_microbatches, problem.stage_to_mesh
            )
        except ScheduleError as error:
            self.candidates.append(Candidate(name, None, str(error).splitlines()[0]))
            return
        if table.mirror is not None:
            if not problem.copies:
                self.candidates.append(Candidate(name, None, "keeps two copies of every stage"))
                return
            mirrored = self._workload(
                table.stage_to_mesh, True, merge=False, mirror=table.mirror.stage_to_mesh
            )
            self.bounds.append(lower_bound(mirrored, self.limit_activations))
        self.named_placements.setdefault(table.stage_to_mesh)
        self.consider(name, table)

    def consider(self, name: str, table: ScheduleTable) -> None:
        """Predicts a table and keeps it if it fits and is the shortest."""
        if table.splits_backward and self.problem.whole:
            table = table.with_whole_backward(self.problem.whole)
        timeline = simulate(table, self.problem.costs, self.problem.transfer, title=name)
        problem, excess = self._excess(table, timeline)
        if problem:
            self.candidates.append(Candidate(name, None, problem))
            if self.closest is None or excess < self.closest[0]:
                self.closest = (excess, f"{name}: {problem}")
            return
        self.candidates.append(Candidate(name, timeline.makespan_s))
        if self.best is None or timeline.makespan_s < self.best[0] - _TOLERANCE:
            self.best = (timeline.makespan_s, name, table, timeline)

    def _excess(self, table: ScheduleTable, timeline: Timeline) -> tuple[str, float]:
        """The limit that is exceeded, and by which factor in the worst place."""
        worst, problem = 0.0, ""
        if self.limit_bytes is not None:
            for memory, limit in zip(timeline.memory, self.limit_bytes, strict=True):
                if memory.peak_bytes > limit and memory.peak_bytes / max(limit, 1) > worst:
                    worst = memory.peak_bytes / max(limit, 1)
                    problem = f"needs {memory.peak_bytes:,} bytes on {memory.mesh}, the limit is {limit:,}"
        if self.limit_activations is not None:
            peaks = zip(peak_activations(table), self.limit_activations, strict=True)
            for mesh, (peak, limit) in enumerate(peaks):
                if peak > limit and peak / max(limit, 1) > worst:
                    worst = peak / max(limit, 1)
                    problem = f"holds {peak} activations on mesh {mesh}, the limit is {limit}"
        return problem, worst

    def try_list_schedules(self, placement: Placement, splits: bool) -> None:
        """List scheduling with the given costs, with several limits and priorities."""
        whole = self._workload(placement, splits, merge=False)
        self.bounds.append(lower_bound(whole, self.limit_activations))
        workload = self._workload(placement, splits, merge=True)
        for name, ordered in self._list_orders(workload):
            if self.best is None or ordered.makespan_s < self.best[0] - _TOLERANCE:
                label = f"{name}, {'split' if splits else 'whole'}"
                self.consider(label, self._table(placement, workload, ordered.orders))

    def _list_orders(self, workload: Workload) -> Iterator[tuple[str, Ordered]]:
        for number, limits in enumerate(self._step_limits(workload)):
            for priority in _PRIORITIES:
                for max_wait in _MAX_WAITS if workload.splits else (0.0,):
                    try:
                        yield (
                            f"list {priority.__name__} {number}",
                            list_schedule(workload, limits, priority, max_wait),
                        )
                    except ScheduleError:
                        break  # not even one microbatch fits

    def _step_limits(self, workload: Workload) -> list[list[int]]:
        """Limits in stages for the generators; the prediction decides in the end what fits."""
        if self.limit_activations is not None:
            return [list(self.limit_activations)]
        count = workload.num_meshes
        chains = max(sum(workload.sizes[k] for k in workload.chains_on(m)) for m in range(count))
        tried = {1, count, 2 * count - 1, (count + 2) // 2, (count + 4) // 3}
        depths = [self.problem.num_microbatches, *sorted(tried)]  # microbatches that a mesh may hold
        return [[max(1, chains) * depth] * count for depth in depths]

    def _workload(
        self, placement: Placement, splits: bool, merge: bool, mirror: Placement | None = None
    ) -> Workload:
        problem = self.problem
        shape = PipelineShape(problem.num_meshes, problem.num_microbatches, placement)
        return costed_workload(
            shape, splits, problem.costs, problem.transfer, whole=problem.whole, merge=merge, mirror=mirror
        )

    def _table(
        self, placement: Placement, workload: Workload, orders: Sequence[Sequence[Step]]
    ) -> ScheduleTable:
        table = ScheduleTable(tuple(map(tuple, expand(workload, orders))), placement, workload.splits)
        validate(table, self.problem.num_microbatches)
        return table

    def result(self) -> SearchResult:
        if self.best is None:
            raise ScheduleError(
                "no schedule fits the memory limits\n"
                f"  closest: {self.closest[1] if self.closest else 'none could be made'}\n"
                "  raise the limit, use more stages or meshes, or recompute activations"
            )
        length, origin, table, timeline = self.best
        bound = min(min(self.bounds, default=0.0), length)
        return SearchResult(table, timeline, origin, bound, tuple(self.candidates))

"""The best order, by branch and bound; for small pipelines to the proof that there is no better one.

Microbatches are alike, so there is a best order in which every lane takes them by number.  What is left to
decide is which lane's forward, backward or weight gradient a mesh takes next.  Of all steps that could
start, the one that would end first decides where to branch: on its mesh, some step must start before that
end (Giffler and Thompson, 1960).  A forward may also be refused for the moment, because what it holds may
be in the way of what comes later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpmd.scheduling.bounds import paths
from mpmd.scheduling.workload import BACKWARD, FORWARD, WEIGHTS, Step, Workload

_EPSILON = 1e-9
_MAX_STATES = 200_000


@dataclass(frozen=True)
class ExactResult:
    """What branch and bound found.

    Attributes:
        orders: steps per mesh of the best order found, if it beats what was known.
        makespan_s: its length, or what was known.
        proved: nothing shorter exists.
        nodes: decisions tried.
    """

    orders: tuple[tuple[Step, ...], ...] | None
    makespan_s: float
    proved: bool
    nodes: int


def branch_and_bound(
    workload: Workload, limits: Sequence[int] | None, known_s: float, most_nodes: int, enough_s: float = 0.0
) -> ExactResult:
    """Searches for an order shorter than ``known_s``.

    Args:
        workload: lanes with their costs, one stage each and one direction.
        limits: per mesh, the most it may hold; None: anything.
        known_s: the length of the best order known.
        most_nodes: after so many decisions the search gives up.
        enough_s: a length at which to stop, because a bound says there is no shorter one.
    """
    search = _Search(workload, limits, known_s, most_nodes, enough_s)
    search.run()
    return ExactResult(search.best, search.best_s, not search.gave_up, search.nodes)


@dataclass
class _Undo:
    step: Step
    free_s: float
    refused: frozenset[int]


class _Search:
    """Depth first, the most promising branch first; every decision can be taken back."""

    def __init__(
        self,
        workload: Workload,
        limits: Sequence[int] | None,
        known_s: float,
        most_nodes: int,
        enough_s: float,
    ) -> None:
        self.workload, self.limits = workload, limits
        self.best: tuple[tuple[Step, ...], ...] | None = None
        self.best_s, self.most_nodes, self.enough_s = known_s, most_nodes, enough_s
        self.nodes, self.gave_up = 0, False
        lanes = workload.lanes
        self.mesh_of = [lane.mesh for lane in lanes]
        self.lanes_on = [workload.lanes_on(mesh) for mesh in range(workload.num_meshes)]
        self.count = len(lanes[0].microbatches)
        self.begun = [[0] * len(lanes) for _ in range(3)]  # per kind and lane, how many were started
        self.ends: list[list[list[float]]] = [[[] for _ in lanes] for _ in range(3)]
        self.free = [0.0] * workload.num_meshes
        self.held = [0] * workload.num_meshes
        self.refused = [frozenset[int]()] * workload.num_meshes
        self.left = [workload.work_s(mesh) for mesh in range(workload.num_meshes)]
        self.left_weights = [
            sum(workload.seconds[lane][WEIGHTS] * self.count for lane in lanes_here)
            for lanes_here in self.lanes_on
        ]
        self.orders: list[list[Step]] = [[] for _ in range(workload.num_meshes)]
        self.paths = paths(workload)
        self.seen: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
        self.states = 0

    def run(self) -> None:
        """Explores without recursion: a stack of what is still to be tried at each depth."""
        stack: list[tuple[Iterator[tuple[Step, bool]], _Undo | None]] = [(self._branches(), None)]
        while stack:
            if self.nodes >= self.most_nodes or self.best_s <= self.enough_s + _EPSILON:
                self.gave_up = self.best_s > self.enough_s + _EPSILON
                return
            branches, _ = stack[-1]
            branch = next(branches, None)
            if branch is None:
                _, undo = stack.pop()
                if undo is not None:
                    self._take_back(undo)
                continue
            self.nodes += 1
            undo = self._apply(*branch)
            if self._is_complete():
                self._keep()
                self._take_back(undo)
            elif self._bound() >= self.best_s - _EPSILON or self._is_dominated():
                self._take_back(undo)
            else:
                stack.append((self._branches(), undo))

    def _branches(self) -> Iterator[tuple[Step, bool]]:
        """What to try here, best first: a step to run, or (True) a forward to refuse for the moment."""
        eligible = list(self._eligible())
        if not eligible:
            return iter(())
        end, first = min(((start + self._seconds(step), step) for start, step in eligible), key=lambda e: e)
        mesh = self.mesh_of[first[1]]
        choices = [
            (start, step)
            for start, step in eligible
            if self.mesh_of[step[1]] == mesh and start < end - _EPSILON
        ]
        if not choices:  # steps that take no time
            choices = [(end, first)]
        choices.sort(key=lambda choice: (choice[0], _PREFERENCE[choice[1][0]], -choice[1][1]))
        decisions = [(step, False) for _, step in choices]
        if first[0] == FORWARD and self.limits is not None:
            decisions.append((first, True))
        return iter(decisions)

    def _eligible(self) -> Iterator[tuple[float, Step]]:
        """Steps whose inputs are scheduled and that fit, with the earliest time they can start."""
        workload = self.workload
        for mesh, lanes in enumerate(self.lanes_on):
            free = self.free[mesh]
            for lane in lanes:
                forward = self.begun[FORWARD][lane]
                if forward < self.count and lane not in self.refused[mesh] and self._fits(mesh, lane):
                    ready = self._arrival(FORWARD, workload.lanes[lane].previous, lane, forward)
                    if ready < math.inf:
                        yield max(free, ready), (FORWARD, lane, forward)
                backward = self.begun[BACKWARD][lane]
                if backward < forward:
                    ready = self._arrival(BACKWARD, workload.lanes[lane].following, lane, backward)
                    if ready < math.inf:
                        yield max(free, ready, self.ends[FORWARD][lane][backward]), (BACKWARD, lane, backward)
                weights = self.begun[WEIGHTS][lane]
                if weights < backward:
                    yield max(free, self.ends[BACKWARD][lane][weights]), (WEIGHTS, lane, weights)

    def _arrival(self, kind: int, source: int | None, lane: int, microbatch: int) -> float:
        if source is None:
            return 0.0
        ends = self.ends[kind][source]
        return ends[microbatch] + self.workload.delays[lane][kind] if microbatch < len(ends) else math.inf

    def _fits(self, mesh: int, lane: int) -> bool:
        return self.limits is None or self.held[mesh] + self.workload.sizes[lane] <= self.limits[mesh]

    def _seconds(self, step: Step) -> float:
        return self.workload.seconds[step[1]][step[0]]

    def _apply(self, step: Step, refuse: bool) -> _Undo:
        kind, lane, microbatch = step
        mesh = self.mesh_of[lane]
        if refuse:
            undo = _Undo((-1, lane, microbatch), self.free[mesh], self.refused[mesh])
            self.refused[mesh] = self.refused[mesh] | {lane}
            return undo
        undo = _Undo(step, self.free[mesh], self.refused[mesh])
        self._run(step)
        self.refused[mesh] = frozenset()
        if kind == BACKWARD and (not self.workload.splits or self.workload.seconds[lane][WEIGHTS] == 0.0):
            self._run((WEIGHTS, lane, microbatch))
        return undo

    def _run(self, step: Step) -> None:
        kind, lane, microbatch = step
        mesh = self.mesh_of[lane]
        ready = self.free[mesh]
        if kind == FORWARD:
            ready = max(ready, self._arrival(FORWARD, self.workload.lanes[lane].previous, lane, microbatch))
            self.held[mesh] += self.workload.sizes[lane]
        elif kind == BACKWARD:
            ready = max(ready, self._arrival(BACKWARD, self.workload.lanes[lane].following, lane, microbatch))
        else:
            self.held[mesh] -= self.workload.sizes[lane]
            self.left_weights[mesh] -= self._seconds(step)
        self.free[mesh] = ready + self._seconds(step)
        self.left[mesh] -= self._seconds(step)
        self.ends[kind][lane].append(self.free[mesh])
        self.begun[kind][lane] += 1
        self.orders[mesh].append(step)

    def _take_back(self, undo: _Undo) -> None:
        kind, lane, _ = undo.step
        mesh = self.mesh_of[lane]
        while kind >= 0:
            step = self.orders[mesh].pop()
            self.ends[step[0]][lane].pop()
            self.begun[step[0]][lane] -= 1
            self.left[mesh] += self._seconds(step)
            if step[0] == FORWARD:
                self.held[mesh] -= self.workload.sizes[lane]
            elif step[0] == WEIGHTS:
                self.held[mesh] += self.workload.sizes[lane]
                self.left_weights[mesh] += self._seconds(step)
            if step == undo.step:
                break
        self.free[mesh] = undo.free_s
        self.refused[mesh] = undo.refused

    def _is_complete(self) -> bool:
        return all(begun == self.count for begun in self.begun[WEIGHTS])

    def _keep(self) -> None:
        length = max(self.free)
        if length < self.best_s - _EPSILON:
            self.best_s = length
            splits = self.workload.splits
            self.best = tuple(tuple(s for s in order if splits or s[0] != WEIGHTS) for order in self.orders)

    def _bound(self) -> float:
        """A length no completion can beat: per mesh what is left of its work, and what must follow."""
        bound = 0.0
        for mesh, lanes in enumerate(self.lanes_on):
            start = self.free[mesh]
            tail = 0.0
            begins = [lane for lane in lanes if self.begun[FORWARD][lane] < self.count]
            if len(begins) == len(lanes) and not self.orders[mesh] and lanes:
                start = max(start, min(self.paths.head[lane] for lane in lanes))
            remaining = [self.paths.tail[lane] for lane in lanes if self.begun[BACKWARD][lane] < self.count]
            if remaining:
                tail = min(remaining)
            bound = max(
                bound, start + self.left[mesh], start + self.left[mesh] - self.left_weights[mesh] + tail
            )
            for lane in begins:
                ready = self._arrival(
                    FORWARD, self.workload.lanes[lane].previous, lane, self.begun[FORWARD][lane]
                )
                if ready < math.inf:
                    rest = self.paths.life[lane] + self.paths.tail[lane]
                    bound = max(bound, max(ready, self.free[mesh]) + rest)
        return bound

    def _is_dominated(self) -> bool:
        """The same steps were run before, and everything that still matters was ready no later."""
        key = (*map(tuple, self.begun), tuple(self.refused))
        times = list(self.free)
        for lane, record in enumerate(self.workload.lanes):
            if record.previous is not None:
                arrivals = self.ends[FORWARD][record.previous][self.begun[FORWARD][lane] :]
                delay = self.workload.delays[lane][FORWARD]
                times += (max(self.free[record.mesh], end + delay) for end in arrivals)
            if record.following is not None:
                arrivals = self.ends[BACKWARD][record.following][self.begun[BACKWARD][lane] :]
                delay = self.workload.delays[lane][BACKWARD]
                times += (max(self.free[record.mesh], end + delay) for end in arrivals)
        known = self.seen.setdefault(key, [])
        if any(all(a <= b + _EPSILON for a, b in zip(other, times, strict=True)) for other in known):
            return True
        if self.states < _MAX_STATES:
            self.states += 1
            known.append(tuple(times))
        return False


_PREFERENCE = {BACKWARD: 0, FORWARD: 1, WEIGHTS: 2}

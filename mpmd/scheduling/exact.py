"""The best order, by branch and bound; for small pipelines to the proof of optimality.

Microbatches are alike, so there is a best order in which every chain takes them by number.  The decision
that remains is which chain's forward, backward or weight gradient a mesh takes next.  Of all steps that
could start, the one that would end first decides where to branch: on its mesh, some step must start before
that end (Giffler and Thompson, 1960).  A forward may also be deferred, because its memory may block later
steps.
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
    """Result of branch and bound.

    Attributes:
        orders: steps per mesh of the best order found, if it beats the known one.
        makespan_s: its length, or the known one.
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
        workload: chains with their costs, one stage each and one direction.
        limits: per mesh, its memory limit; None: unlimited.
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
    """Depth first, the most promising branch first; every decision can be undone."""

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
        chains = workload.chains
        self.mesh_of = [chain.mesh for chain in chains]
        self.chains_on = [workload.chains_on(mesh) for mesh in range(workload.num_meshes)]
        self.count = len(chains[0].microbatches)
        self.begun = [[0] * len(chains) for _ in range(3)]  # per kind and chain, the number started
        self.ends: list[list[list[float]]] = [[[] for _ in chains] for _ in range(3)]
        self.free = [0.0] * workload.num_meshes
        self.held = [0] * workload.num_meshes
        self.refused = [frozenset[int]()] * workload.num_meshes
        self.left = [workload.work_s(mesh) for mesh in range(workload.num_meshes)]
        self.left_weights = [
            sum(workload.seconds[chain][WEIGHTS] * self.count for chain in chains_here)
            for chains_here in self.chains_on
        ]
        self.orders: list[list[Step]] = [[] for _ in range(workload.num_meshes)]
        self.paths = paths(workload)
        self.seen: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
        self.states = 0

    def run(self) -> None:
        """Explores without recursion: a stack of the remaining choices at each depth."""
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
            if all(begun == self.count for begun in self.begun[WEIGHTS]):
                self._keep()
                self._take_back(undo)
            elif self._bound() >= self.best_s - _EPSILON or self._is_dominated():
                self._take_back(undo)
            else:
                stack.append((self._branches(), undo))

    def _branches(self) -> Iterator[tuple[Step, bool]]:
        """The choices here, best first: a step to run, or (True) a forward to defer."""
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
        for mesh, chains in enumerate(self.chains_on):
            free = self.free[mesh]
            for chain in chains:
                forward = self.begun[FORWARD][chain]
                if forward < self.count and chain not in self.refused[mesh] and self._fits(mesh, chain):
                    ready = self._arrival((FORWARD, chain, forward))
                    if ready < math.inf:
                        yield max(free, ready), (FORWARD, chain, forward)
                backward = self.begun[BACKWARD][chain]
                if backward < forward:
                    ready = self._arrival((BACKWARD, chain, backward))
                    if ready < math.inf:
                        yield (
                            max(free, ready, self.ends[FORWARD][chain][backward]),
                            (BACKWARD, chain, backward),
                        )
                weights = self.begun[WEIGHTS][chain]
                if weights < backward:
                    yield max(free, self.ends[BACKWARD][chain][weights]), (WEIGHTS, chain, weights)

    def _arrival(self, step: Step) -> float:
        """When the input of a forward or backward is there; infinite while that is unknown."""
        kind, chain, microbatch = step
        source = self.workload.chains[chain].source(kind)
        if source is None:
            return 0.0
        ends = self.ends[kind][source]
        return ends[microbatch] + self.workload.delays[chain][kind] if microbatch < len(ends) else math.inf

    def _fits(self, mesh: int, chain: int) -> bool:
        return self.limits is None or self.held[mesh] + self.workload.sizes[chain] <= self.limits[mesh]

    def _seconds(self, step: Step) -> float:
        return self.workload.seconds[step[1]][step[0]]

    def _apply(self, step: Step, refuse: bool) -> _Undo:
        kind, chain, microbatch = step
        mesh = self.mesh_of[chain]
        if refuse:
            undo = _Undo((-1, chain, microbatch), self.free[mesh], self.refused[mesh])
            self.refused[mesh] = self.refused[mesh] | {chain}
            return undo
        undo = _Undo(step, self.free[mesh], self.refused[mesh])
        self._run(step)
        self.refused[mesh] = frozenset()
        if kind == BACKWARD and (not self.workload.splits or self.workload.seconds[chain][WEIGHTS] == 0.0):
            self._run((WEIGHTS, chain, microbatch))
        return undo

    def _run(self, step: Step) -> None:
        kind, chain, _ = step
        mesh = self.mesh_of[chain]
        ready = self.free[mesh]
        if kind != WEIGHTS:
            ready = max(ready, self._arrival(step))
        if kind == FORWARD:
            self.held[mesh] += self.workload.sizes[chain]
        elif kind == WEIGHTS:
            self.held[mesh] -= self.workload.sizes[chain]
            self.left_weights[mesh] -= self._seconds(step)
        self.free[mesh] = ready + self._seconds(step)
        self.left[mesh] -= self._seconds(step)
        self.ends[kind][chain].append(self.free[mesh])
        self.begun[kind][chain] += 1
        self.orders[mesh].append(step)

    def _take_back(self, undo: _Undo) -> None:
        kind, chain, _ = undo.step
        mesh = self.mesh_of[chain]
        while kind >= 0:
            step = self.orders[mesh].pop()
            self.ends[step[0]][chain].pop()
            self.begun[step[0]][chain] -= 1
            self.left[mesh] += self._seconds(step)
            if step[0] == FORWARD:
                self.held[mesh] -= self.workload.sizes[chain]
            elif step[0] == WEIGHTS:
                self.held[mesh] += self.workload.sizes[chain]
                self.left_weights[mesh] += self._seconds(step)
            if step == undo.step:
                break
        self.free[mesh] = undo.free_s
        self.refused[mesh] = undo.refused

    def _keep(self) -> None:
        length = max(self.free)
        if length < self.best_s - _EPSILON:
            self.best_s = length
            splits = self.workload.splits
            self.best = tuple(tuple(s for s in order if splits or s[0] != WEIGHTS) for order in self.orders)

    def _bound(self) -> float:
        """A lower bound on every completion: per mesh its remaining work, and the work that must follow."""
        bound = 0.0
        for mesh, chains in enumerate(self.chains_on):
            start = self.free[mesh]
            tail = 0.0
            begins = [chain for chain in chains if self.begun[FORWARD][chain] < self.count]
            if len(begins) == len(chains) and not self.orders[mesh] and chains:
                start = max(start, min(self.paths.head[chain] for chain in chains))
            remaining = [
                self.paths.tail[chain] for chain in chains if self.begun[BACKWARD][chain] < self.count
            ]
            if remaining:
                tail = min(remaining)
            bound = max(
                bound, start + self.left[mesh], start + self.left[mesh] - self.left_weights[mesh] + tail
            )
            for chain in begins:
                ready = self._arrival((FORWARD, chain, self.begun[FORWARD][chain]))
                if ready < math.inf:
                    rest = self.paths.life[chain] + self.paths.tail[chain]
                    bound = max(bound, max(ready, self.free[mesh]) + rest)
        return bound

    def _is_dominated(self) -> bool:
        """The same steps were run before, and everything that still matters was ready no later."""
        key = (*map(tuple, self.begun), tuple(self.refused))
        times = list(self.free)
        for chain, record in enumerate(self.workload.chains):
            for kind in (FORWARD, BACKWARD):
                source = record.source(kind)
                if source is not None:
                    arrivals = self.ends[kind][source][self.begun[kind][chain] :]
                    delay = self.workload.delays[chain][kind]
                    times += [max(self.free[record.mesh], end + delay) for end in arrivals]
        known = self.seen.setdefault(key, [])
        if any(all(a <= b + _EPSILON for a, b in zip(other, times, strict=True)) for other in known):
            return True
        if self.states < _MAX_STATES:
            self.states += 1
            known.append(tuple(times))
        return False


_PREFERENCE = {BACKWARD: 0, FORWARD: 1, WEIGHTS: 2}

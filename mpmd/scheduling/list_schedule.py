"""List scheduling."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpmd.errors import ScheduleError
from mpmd.scheduling.workload import BACKWARD, FORWARD, WEIGHTS, Step, Workload

Priority = Callable[[Step], tuple[float, ...]]
"""The smallest goes first."""


@dataclass(frozen=True)
class Ordered:
    """Steps per mesh in order, and when the last of them ends."""

    orders: tuple[tuple[Step, ...], ...]
    makespan_s: float


def backward_first(step: Step) -> tuple[float, ...]:
    """Backwards of old microbatches, then forwards that are furthest on, then weight gradients."""
    kind, chain, microbatch = step
    if kind == BACKWARD:
        return (0, microbatch, -chain)
    return (1, -chain, microbatch) if kind == FORWARD else (2, microbatch, chain)


def old_first(step: Step) -> tuple[float, ...]:
    """Backwards of old microbatches, then forwards of old microbatches, then weight gradients."""
    kind, chain, microbatch = step
    return (float(kind), microbatch, -chain if kind != WEIGHTS else chain)


def forward_first(step: Step) -> tuple[float, ...]:
    """Forwards that are furthest on, then backwards of old microbatches, then weight gradients."""
    kind, chain, microbatch = step
    if kind == FORWARD:
        return (0, -chain, microbatch)
    return (1, microbatch, -chain) if kind == BACKWARD else (2, microbatch, chain)


class Clockwork:
    """Simulates steps in the order of choice: when each is ready and how much each mesh holds."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.now = 0.0
        self.free = [0.0] * workload.num_meshes
        self.held = [0] * workload.num_meshes
        self.pending: list[list[Step]] = [[] for _ in range(workload.num_meshes)]
        self.orders: list[list[Step]] = [[] for _ in range(workload.num_meshes)]
        self.ends: dict[Step, float] = {}
        self._events: list[float] = []

    def ready_s(self, step: Step) -> float:
        """When the inputs of a step are ready; infinite while that is unknown."""
        kind, index, microbatch = step
        chain, delays, ends = self.workload.chains[index], self.workload.delays[index], self.ends
        source = chain.source(kind)
        ready = 0.0 if source is None else ends.get((kind, source, microbatch), math.inf) + delays[kind]
        return ready if kind == FORWARD else max(ready, ends.get((FORWARD, index, microbatch), math.inf))

    def run(self, step: Step) -> None:
        kind, index, _ = step
        workload = self.workload
        mesh = workload.chains[index].mesh
        end = self.now + workload.seconds[index][kind]
        self.ends[step] = self.free[mesh] = end
        self.orders[mesh].append(step)
        if kind == FORWARD:
            self.held[mesh] += workload.sizes[index]
        elif kind == WEIGHTS:
            self.pending[mesh].remove(step)
            self.held[mesh] -= workload.sizes[index]
        elif workload.splits and workload.seconds[index][WEIGHTS] > 0:
            self.pending[mesh].append((WEIGHTS, index, step[2]))
        else:
            self.held[mesh] -= workload.sizes[index]
            if workload.splits:  # takes no time: nothing to wait for
                self.orders[mesh].append((WEIGHTS, index, step[2]))
        heapq.heappush(self._events, end)
        chain = workload.chains[index]
        follower = {FORWARD: chain.following, BACKWARD: chain.previous}.get(kind)
        if follower is not None:
            arrival = end + workload.delays[follower][kind]
            if arrival > end:
                heapq.heappush(self._events, arrival)

    def advance(self) -> bool:
        """Moves on to the next time at which something ends or arrives; False if there is none."""
        while self._events and self._events[0] <= self.now:
            heapq.heappop(self._events)
        if not self._events:
            return False
        self.now = self._events[0]
        return True

    def result(self) -> Ordered:
        return Ordered(tuple(map(tuple, self.orders)), max(self.free, default=0.0))


def list_schedule(
    workload: Workload, limits: Sequence[int], priority: Priority = backward_first, max_wait: float = 0.0
) -> Ordered:
    """Every free mesh takes the most urgent step that is ready and fits.

    A forward fits if, besides it, there is still room for everything that the oldest unfinished microbatch
    will need on the mesh.  So the oldest can always continue, and after it, one by one, all of them.

    Args:
        workload: what to order.
        limits: per mesh, its memory limit; at least the need of one microbatch.
        priority: the order among the ready steps.
        max_wait: a weight gradient lets the mesh wait instead if another step will be ready within this
            part of the weight gradient's own time.

    Raises:
        ScheduleError: a limit is too small for one microbatch.
    """
    chooser = _FreeChoice(workload, limits, priority, max_wait)
    clock = chooser.clock
    remaining = sum(
        len(chain.microbatches) * (3 if workload.splits and seconds[WEIGHTS] > 0 else 2)
        for chain, seconds in zip(workload.chains, workload.seconds, strict=True)
    )
    while remaining:
        for mesh in range(workload.num_meshes):
            while clock.free[mesh] <= clock.now:
                step = chooser.choose(mesh)
                if step is None:
                    break
                chooser.run(step)
                remaining -= 1
        if remaining and not clock.advance():
            raise ScheduleError(
                f"list scheduling stopped with {remaining} steps left, each of which waits for another\n"
                f"  give more memory: a limit below the need of one microbatch lets no step begin"
            )
    return clock.result()


class _FreeChoice:
    """Which steps are next in each chain, and which of them may start."""

    def __init__(
        self, workload: Workload, limits: Sequence[int], priority: Priority, max_wait: float
    ) -> None:
        self.clock = Clockwork(workload)
        self.workload, self.limits, self.priority, self.max_wait = workload, limits, priority, max_wait
        self.chains_on = [workload.chains_on(mesh) for mesh in range(workload.num_meshes)]
        self.following = [[chain.microbatches.start, chain.microbatches.start] for chain in workload.chains]
        self.needs: dict[tuple[int, int], int] = {}  # (mesh, microbatch): the memory it will still take
        for chain, size in zip(workload.chains, workload.sizes, strict=True):
            for microbatch in chain.microbatches:
                key = (chain.mesh, microbatch)
                self.needs[key] = self.needs.get(key, 0) + size
        for mesh, limit in enumerate(limits):
            least = max((need for (m, _), need in self.needs.items() if m == mesh), default=0)
            if least > limit:
                raise ScheduleError(
                    f"mesh {mesh} may hold {limit}, but a single microbatch needs {least} there\n"
                    "  raise the limit, or put fewer stages on the mesh"
                )
        last = [index for index, chain in enumerate(workload.chains) if chain.following is None]
        starts = {index: workload.chains[index].microbatches for index in last}
        age = {m: (m - r.start, i) for i, r in starts.items() for m in r}
        self.by_age = sorted(age, key=lambda m: age[m])
        self.last_chain = {m: i for i, r in starts.items() for m in r}
        self.oldest = 0

    def run(self, step: Step) -> None:
        kind, index, microbatch = step
        if kind != WEIGHTS:
            self.following[index][kind] += 1
        if kind == FORWARD:
            self.needs[self.workload.chains[index].mesh, microbatch] -= self.workload.sizes[index]
            while self.oldest < len(self.by_age) and self._entered(self.by_age[self.oldest]):
                self.oldest += 1
        self.clock.run(step)

    def _entered(self, microbatch: int) -> bool:
        return self.following[self.last_chain[microbatch]][FORWARD] > microbatch

    def choose(self, mesh: int) -> Step | None:
        clock = self.clock
        best: Step | None = None
        soonest = math.inf
        for index in self.chains_on[mesh]:
            end = self.workload.chains[index].microbatches.stop
            for kind in (FORWARD, BACKWARD):
                microbatch = self.following[index][kind]
                if microbatch >= end:
                    continue
                step = (kind, index, microbatch)
                if kind == FORWARD and not self._fits(mesh, step):
                    continue
                ready = clock.ready_s(step)
                soonest = min(soonest, ready)
                if ready <= clock.now and (best is None or self.priority(step) < self.priority(best)):
                    best = step
        if clock.pending[mesh]:
            weights = min(clock.pending[mesh], key=self.priority)
            wait = self.max_wait * self.workload.seconds[weights[1]][WEIGHTS]
            if best is None:
                return None if wait and soonest <= clock.now + wait else weights
            return weights if self.priority(weights) < self.priority(best) else best
        return best

    def _fits(self, mesh: int, step: Step) -> bool:
        _, index, microbatch = step
        room = self.limits[mesh] - self.clock.held[mesh] - self.workload.sizes[index]
        if self.oldest < len(self.by_age) and self.by_age[self.oldest] != microbatch:
            room -= self.needs.get((mesh, self.by_age[self.oldest]), 0)
        return room >= 0


def fill_weights(
    workload: Workload,
    orders: Sequence[Sequence[Step]],
    limits: Sequence[int],
    lookahead: int = 0,
    weights_first: bool = False,
) -> Ordered | None:
    """Keeps the order of forwards and backwards and puts weight gradients in the gaps or to make room.

    With a lookahead, a mesh whose next step is not ready may take one of the steps behind it, if the limit
    then holds for the steps in between even before any of their weight gradients.

    Args:
        workload: what to order; its backwards are split.
        orders: per mesh, its forwards and backwards.
        limits: per mesh, its memory limit.
        lookahead: how many steps behind the next one may overtake it.
        weights_first: a step overtakes only where no weight gradient waits.

    Returns:
        The steps, or None if the given order cannot hold the limits.
    """
    clock = Clockwork(workload)
    left = [list(order) for order in orders]
    while True:
        for mesh, steps in enumerate(left):
            while clock.free[mesh] <= clock.now:
                ahead = 0 if weights_first and clock.pending[mesh] else lookahead
                at = _next_in_order(clock, mesh, steps, limits[mesh], ahead)
                if at is not None:
                    clock.run(steps.pop(at))
                elif clock.pending[mesh]:
                    clock.run(clock.pending[mesh][0])
                else:
                    break
        if not clock.advance():
            return None if any(left) else clock.result()


def _next_in_order(clock: Clockwork, mesh: int, steps: list[Step], limit: int, lookahead: int) -> int | None:
    """Position of the step to run now; None if none can."""
    sizes = clock.workload.sizes
    bare = clock.held[mesh] - sum(sizes[index] for _, index, _ in clock.pending[mesh])
    highest = bare
    for at, step in enumerate(steps[: lookahead + 1]):
        kind, index, _ = step
        if clock.ready_s(step) <= clock.now:
            size = sizes[index]
            if kind == BACKWARD or (clock.held[mesh] + size <= limit and highest + size <= limit):
                return at
        bare += sizes[index] if kind == FORWARD else -sizes[index]
        highest = max(highest, bare)
    return None

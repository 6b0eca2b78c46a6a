"""Shortens a given order by small changes on its critical path."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.scheduling.list_schedule import Ordered
from mpmd.scheduling.workload import BACKWARD, FORWARD, WEIGHTS, Step, Workload
from mpmd.support.progress import ProgressLine

_SEED = 20
_MAX_MOVE = 6


@dataclass(frozen=True)
class _Node:
    """The place of a step in the order of its mesh."""

    mesh: int
    at: int


def improve(
    workload: Workload,
    orders: Sequence[Sequence[Step]],
    limits: Sequence[int] | None,
    effort: int,
    progress: ProgressLine | None = None,
) -> Ordered | None:
    """Moves steps on the critical path forward in the order of their mesh, as long as it does not get longer.

    The length of an order is its critical path: a chain of steps without a gap.  Only a change on it can
    help, and only where two steps follow each other because of the order, not of the data.  Moves that keep
    the length are taken too, since they lead on.

    Args:
        workload: chains with their costs.
        orders: steps per mesh; legal.
        limits: per mesh, its memory limit; None: unlimited.
        effort: steps timed in all; each move costs as many as there are steps.
        progress: is shown each change.

    Returns:
        A shorter order, the same for the same input; None if none was found.
    """
    candidate = random.Random(_SEED)
    current = [list(order) for order in orders]
    size = max(1, sum(map(len, current)))
    timed = _Timing(workload, current)
    best: list[list[Step]] | None = None
    best_s = timed.makespan_s
    for tried in range(effort // size):
        if progress is not None:
            progress.show("changes", tried, effort // size)
        moves = timed.moves()
        if not moves:
            break
        node = moves[candidate.randrange(len(moves))]
        distance = 1 + candidate.randrange(min(node.at, _MAX_MOVE))
        order = current[node.mesh]
        early = node.at - distance
        changed = [*order[:early], order[node.at], *order[early : node.at], *order[node.at + 1 :]]
        if limits is not None and not _holds(workload, changed, limits[node.mesh]):
            continue
        current[node.mesh] = changed
        attempt = _Timing(workload, current)
        if attempt.complete and attempt.makespan_s <= timed.makespan_s + 1e-12:
            timed = attempt
            if timed.makespan_s < best_s - 1e-12:
                best, best_s = [list(o) for o in current], timed.makespan_s
        else:
            current[node.mesh] = order
    return None if best is None else Ordered(tuple(map(tuple, best)), best_s)


def _holds(workload: Workload, order: Sequence[Step], limit: int) -> bool:
    releases = WEIGHTS if workload.splits else BACKWARD
    held = 0
    for kind, chain, _ in order:
        if kind == FORWARD:
            held += workload.sizes[chain]
            if held > limit:
                return False
        if kind == releases:
            held -= workload.sizes[chain]
    return True


class _Timing:
    """Start and end of every step of an order, and the reason of each start."""

    def __init__(self, workload: Workload, orders: Sequence[Sequence[Step]]) -> None:
        self.workload, self.orders = workload, orders
        self.ends: dict[Step, float] = {}
        self.bound_by: dict[Step, Step | None] = {}
        self.position: dict[Step, _Node] = {}
        self._sweep()
        self.complete = len(self.ends) == sum(map(len, orders))
        self.makespan_s = max(self.ends.values(), default=0.0)

    def _sweep(self) -> None:
        at = [0] * len(self.orders)
        free = [0.0] * len(self.orders)
        last: list[Step | None] = [None] * len(self.orders)
        waiting: dict[Step, int] = {}
        runnable = list(range(len(self.orders)))
        while runnable:
            mesh = runnable.pop()
            order = self.orders[mesh]
            while at[mesh] < len(order):
                step = order[at[mesh]]
                start, cause = free[mesh], last[mesh]
                missing = None
                for source, delay in self._inputs(step):
                    end = self.ends.get(source)
                    if end is None:
                        missing = source
                        break
                    if end + delay > start:
                        start, cause = end + delay, source
                if missing is not None:
                    waiting[missing] = mesh
                    break
                free[mesh] = self.ends[step] = start + self.workload.seconds[step[1]][step[0]]
                self.bound_by[step] = cause
                self.position[step] = _Node(mesh, at[mesh])
                last[mesh] = step
                at[mesh] += 1
                if step in waiting:
                    runnable.append(waiting.pop(step))

    def _inputs(self, step: Step) -> list[tuple[Step, float]]:
        kind, index, microbatch = step
        chain, delays = self.workload.chains[index], self.workload.delays[index]
        own = [] if kind == FORWARD else [((kind - 1, index, microbatch), 0.0)]
        source = None if kind == WEIGHTS else chain.source(kind)
        return own if source is None else [((kind, source, microbatch), delays[kind]), *own]

    def moves(self) -> list[_Node]:
        """Steps on the critical path that could come before the step their mesh runs before them."""
        if not self.ends:
            return []
        step: Step | None = max(self.ends, key=lambda s: (self.ends[s], s))
        found = []
        while step is not None:
            node, cause = self.position[step], self.bound_by[step]
            if node.at:
                before = self.orders[node.mesh][node.at - 1]
                if all(source != before for source, _ in self._inputs(step)):
                    found.append(node)
            step = cause
        return found

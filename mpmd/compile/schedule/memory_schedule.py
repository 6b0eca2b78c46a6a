"""The order of instructions that needs least memory: the best of several lists, improved by local search.

Lists take what frees most first, depth first, or the order that was written.  In the search, instructions at
the peak move to the other side of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from mpmd.compile.analysis.dataflow import HloValue
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.schedule.heap import Heap
from mpmd.errors import PassError
from mpmd.support.passes import Pass

_MAX_STEPS = 200_000  # instructions simulated, over all tries
_MAX_TRIES = 200


def exchanged(order: list[HloInstruction], heap: Heap) -> list[HloInstruction]:
    """An order that is not worse; the same one if no move improves it.

    Instructions whose values are allocated before the peak and needed only after it are computed later;
    instructions after the peak that could free memory are computed earlier.  Moves are tried one by one, and
    kept if the order's score gets smaller.
    """
    current = heap.simulate(order)
    tries = min(_MAX_TRIES, _MAX_STEPS // max(1, len(order)))
    while tries > 0 and current.profile:
        at = current.profile.index(current.peak)
        better = None
        for moved in _moves(order, at, heap):
            tries -= 1
            tried = heap.simulate(moved)
            if tried.score < current.score:
                better = moved, tried
                break
            if tries <= 0:
                break
        if better is None:
            break
        order, current = better
    return order


def _moves(order: list[HloInstruction], at: int, heap: Heap) -> list[list[HloInstruction]]:
    """Orders that differ in one group of instructions around the peak."""
    places = {instruction: place for place, instruction in enumerate(order)}
    moves: list[tuple[int, list[HloInstruction]]] = []
    for place, instruction in enumerate(order):
        sizes = sum(heap.sizes[v] for v in heap.traffic[instruction].defines)
        if place <= at and sizes:
            later = _sunk(order, place, at)
            if later is not None:
                moves.append((-sizes, later))
        elif place > at:
            freed = sum(heap.sizes[v] for v in heap.traffic[instruction].reads)
            if freed > sizes:
                moves.append((sizes - freed, _hoisted(order, place, at, places)))
    moves.sort(key=lambda m: m[0])
    return [m for _, m in moves[:32]]


def _sunk(order: list[HloInstruction], place: int, at: int) -> list[HloInstruction] | None:
    """The order with an instruction after the peak, and with it everything up to the peak that needs it.

    None if the instruction at the peak needs it.
    """
    group = {order[place]}
    for instruction in order[place + 1 : at + 1]:
        needed = (*instruction.operands, *instruction.control_predecessors)
        if any(n in group for n in needed):
            group.add(instruction)
    if order[at] in group:
        return None
    stays = [i for i in order[: at + 1] if i not in group]
    return [*stays, *(i for i in order[: at + 1] if i in group), *order[at + 1 :]]


def _hoisted(
    order: list[HloInstruction], place: int, at: int, places: dict[HloInstruction, int]
) -> list[HloInstruction]:
    """The order with an instruction before the peak, and with it its dependences from after the peak.

    As early as its dependences allow.
    """
    group = {order[place]}
    for instruction in reversed(order[at:place]):
        if any(u in group for u in (*instruction.users, *instruction.control_successors)):
            group.add(instruction)
    if order[at] in group:
        return order
    needed = [places[n] for i in group for n in (*i.operands, *i.control_predecessors) if n not in group]
    first = max(needed, default=-1) + 1
    moved = [i for i in order[at : place + 1] if i in group]
    return [*order[:first], *moved, *(i for i in order[first:] if i not in group)]


def post_order(computation: HloComputation, heap: Heap) -> list[HloInstruction]:
    """Operands before users, in the order in which they are named.

    Source: XLA's post-order memory scheduler.
    """
    return computation.post_order()


_Priority = tuple[int, int, int, int]


def list_order(computation: HloComputation, heap: Heap) -> list[HloInstruction]:
    """Greedy order by bytes freed less bytes allocated, then by number of users, then by the old order.

    Instructions that neither allocate nor free, such as tuples and scalars, run as soon as they can.

    Source: XLA's list memory scheduler.
    """
    return _ListScheduler(computation, heap).run()


class _ListScheduler:
    """The state of one run."""

    def __init__(self, computation: HloComputation, heap: Heap) -> None:
        self.heap = heap
        self.places = {instruction: place for place, instruction in enumerate(computation)}
        self.missing = {i: len(dict.fromkeys((*i.operands, *i.control_predecessors))) for i in computation}
        self.left: dict[HloValue, int] = heap.readers_left(list(computation))
        self.current: dict[HloInstruction, _Priority] = {}
        self.ready: list[tuple[_Priority, HloInstruction]] = []

    def run(self) -> list[HloInstruction]:
        for instruction, count in self.missing.items():
            if not count:
                self._offer(instruction)
        order: list[HloInstruction] = []
        while self.ready:
            priority, instruction = heapq.heappop(self.ready)
            if self.current.get(instruction) != priority:
                continue  # a newer entry has another priority, or it ran
            del self.current[instruction]
            order.append(instruction)
            self._ran(instruction)
        return order

    def _offer(self, instruction: HloInstruction) -> None:
        self.current[instruction] = self._priority(instruction)
        heapq.heappush(self.ready, (self.current[instruction], instruction))

    def _priority(self, instruction: HloInstruction) -> _Priority:
        """Smallest first; the last entry is different for each instruction."""
        traffic, sizes = self.heap.traffic[instruction], self.heap.sizes
        allocated = sum(sizes[v] for v in traffic.defines)
        allocated += max((self.heap.inside.get(c, 0) for c in traffic.callees), default=0)
        freed = sum(sizes[v] for v in traffic.reads if self.left.get(v) == 1)
        urgent = 0 if allocated <= 8 and not traffic.callees else 1
        return urgent, allocated - freed, -len(instruction.users), self.places[instruction]

    def _ran(self, instruction: HloInstruction) -> None:
        """Its users may be ready now, and the last readers of its operands free more."""
        for value in self.heap.traffic[instruction].reads:
            if value not in self.left:
                continue
            self.left[value] -= 1
            if self.left[value] == 1:
                for reader in self.heap.readers[value]:
                    if reader in self.current:
                        self._offer(reader)
        for user in dict.fromkeys((*instruction.users, *instruction.control_successors)):
            self.missing[user] -= 1
            if not self.missing[user]:
                self._offer(user)


Scheduler = Callable[[HloComputation, Heap], list[HloInstruction]]

SCHEDULERS: dict[str, Scheduler] = {
    "list": list_order,
    "post-order": post_order,
}
"""By name, in the order of preference among equals."""


class MemorySchedule(Pass):
    """Orders every computation to reduce its peak memory.

    p = f(x); q = f(y); r = sum(p); s = sum(q)  ->  p = f(x); r = sum(p); q = f(y); s = sum(q)

    Callees come first.  Each scheduler orders the computation, the simulated heap gives the peak of each
    order, and the one with the lowest peak is taken; `exchange` then searches near it.

    Requires: nothing; of asynchronous operations the bytes are not known exactly.
    Ensures: the module is scheduled, and operands come before users.
    Cost: n log n for each scheduler; the exchange a bounded number of simulations.
    Source: XLA's memory schedulers, of which it also takes the best.

    Attributes:
        scheduler: one of `list`, `post-order`, or `best`.
        exchange: whether to search near the best order.
    """

    prefix = "hlo-"
    scheduler: str = "best"
    exchange: bool = True

    def run(self, module: HloModule) -> bool:
        """Orders `module`; True iff it was not scheduled before.

        Raises:
            PassError: there is no such scheduler.
        """
        if self.scheduler != "best" and self.scheduler not in SCHEDULERS:
            raise PassError(
                f"{self.name} has no scheduler {self.scheduler!r}\n  it has best, {', '.join(SCHEDULERS)}"
            )
        if module.is_scheduled:
            return False
        heap = Heap(module)
        for computation in module.computations:
            if computation not in heap.kept:
                computation.reorder(computation.post_order())
        for computation in heap.computations:
            order = self._best(computation, heap)
            heap.settle(computation, order)
            computation.reorder(order)
        module.is_scheduled = True
        return True

    def _best(self, computation: HloComputation, heap: Heap) -> list[HloInstruction]:
        chosen = SCHEDULERS if self.scheduler == "best" else {self.scheduler: SCHEDULERS[self.scheduler]}
        orders = [scheduler(computation, heap) for scheduler in chosen.values()]
        best = min(orders, key=lambda order: heap.simulate(order).score)
        return exchanged(best, heap) if self.exchange else best

"""Orders of instructions by a list, and the order in which they were written."""

from __future__ import annotations

import heapq

from mpmd.compile.analysis.dataflow import HloValue
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.schedule.heap import Heap


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
        """The order."""
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

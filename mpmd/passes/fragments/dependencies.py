"""Orders of the ops of a function: dependency order, cycles, and transitive dependences."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from mpmd import ir

Edges = Iterable[tuple[ir.Op, ir.Op]]


class Dependencies:
    """The dependences of each op of a function, by data flow and by extra edges (before, after).

    Attributes:
        ops: the ops of the function but its terminator, in order.
        place: position of each op.
        needs: positions of the ops that each op needs, directly.
    """

    def __init__(self, f: ir.Func, edges: Edges = ()) -> None:
        self.ops = ir.ops(f)
        self.place = {op: i for i, op in enumerate(self.ops)}
        self.needs: list[set[int]] = [set() for _ in self.ops]
        for i, op in enumerate(self.ops):
            for value in ir.read_by(op):
                source = ir.producer(value)
                if source is not None and source in self.place:
                    self.needs[i].add(self.place[source])
        for before, after in edges:
            self.needs[self.place[after]].add(self.place[before])

    def stable_order(self) -> tuple[list[ir.Op], list[ir.Op]]:
        """The ops in dependency order, and one cycle if there is any (else nothing).

        The order results from repeated passes over the ops, each taking, in order, the ops whose dependences
        were all taken; where no op can be taken the first one is taken nevertheless.  That is MLIR's
        `sortTopologically`, in linear time: an op is taken in the round of its last dependence, or in the
        next round if that comes after it.
        """
        waits = [len(needs) for needs in self.needs]
        needed_by = self._needed_by()
        rounds, taken = [0] * len(self.ops), [False] * len(self.ops)
        cycle: list[ir.Op] = []
        ready = [i for i, count in enumerate(waits) if not count]
        last_round = first_left = 0
        while True:
            while ready:
                i = ready.pop()
                taken[i] = True
                last_round = max(last_round, rounds[i])
                for j in needed_by[i]:
                    if not taken[j]:
                        rounds[j] = max(rounds[j], rounds[i] + (i > j))
                        waits[j] -= 1
                        if not waits[j]:
                            ready.append(j)
            while first_left < len(taken) and taken[first_left]:
                first_left += 1
            if first_left == len(taken):
                break
            cycle = cycle or self._cycle(taken)
            rounds[first_left] = last_round + 1
            waits[first_left] = 0
            ready.append(first_left)
        order = sorted(range(len(self.ops)), key=lambda i: (rounds[i], i))
        return [self.ops[i] for i in order], cycle

    def top_down(self) -> list[ir.Op]:
        """The ops in dependency order: of those that are ready always the first one in the old order.

        Ops on a cycle, which only extra edges can create, are left out.
        """
        waits = [len(needs) for needs in self.needs]
        needed_by = self._needed_by()
        ready = [i for i, count in enumerate(waits) if not count]  # sorted, and so a heap
        order = []
        while ready:
            i = heapq.heappop(ready)
            order.append(self.ops[i])
            for j in needed_by[i]:
                waits[j] -= 1
                if not waits[j]:
                    heapq.heappush(ready, j)
        return order

    def _needed_by(self) -> list[list[int]]:
        needed_by: list[list[int]] = [[] for _ in self.ops]
        for i, needs in enumerate(self.needs):
            for j in needs:
                needed_by[j].append(i)
        return needed_by

    def _cycle(self, taken: Sequence[bool]) -> list[ir.Op]:
        """A cycle among the ops not taken: each needs the next, and the last one the first."""
        i, path = taken.index(False), dict[int, int]()
        while i not in path:
            path[i] = len(path)
            i = min(j for j in self.needs[i] if not taken[j])
        return [self.ops[j] for j in list(path)[path[i] :]]

    def reach(self) -> list[int]:
        """For each op the set of all ops that it needs, directly or not, as the bits of an integer.

        Data flow alone has no cycles and follows the order of the ops; this function does not support edges
        that go backwards.
        """
        found: list[int] = []
        for needs in self.needs:
            bits = 0
            for j in needs:
                bits |= found[j] | 1 << j
            found.append(bits)
        return found

    def path(self, source: ir.Op, target: ir.Op) -> list[ir.Op]:
        """A shortest path from `source` to `target` along data flow; empty if there is none."""
        start, end = self.place[source], self.place[target]
        came_from: dict[int, int] = {end: end}
        queue = [(0, end)]
        while queue:
            steps, i = heapq.heappop(queue)
            if i == start:
                found = [i]
                while found[-1] != end:
                    found.append(came_from[found[-1]])
                return [self.ops[j] for j in found]
            for j in sorted(self.needs[i]):
                if j not in came_from:
                    came_from[j] = i
                    heapq.heappush(queue, (steps + 1, j))
        return []

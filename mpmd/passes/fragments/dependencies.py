"""Orders of the ops of a function: dependency order, cycles, transitive dependences, and control edges.

A control edge is an order between fragments that data flow does not give.  While a schedule has to be obeyed
by later passes, a fragment that must come first has a number among its `mpmd.control_ids`, and one that must
come later lists such numbers in `mpmd.control_after`.  Both are plain attributes, so that the program stays
valid; a merged fragment has the numbers of its parts.  The dialect's own form, operands without a block
argument, is for tools that compare text.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from mpmd import ir

_IDS, _AFTER = "mpmd.control_ids", "mpmd.control_after"
_START = "mpmd.control_operand_start_idx"


def control_edges(f: ir.Func) -> list[tuple[ir.Fragment, ir.Fragment]]:
    """The (before, after) pairs of a schedule, in program order of the later one."""
    numbered = {number: g for g in ir.fragments(f) for number in _numbers(g, _IDS)}
    pairs = ((numbered.get(number, g), g) for g in ir.fragments(f) for number in _numbers(g, _AFTER))
    return list(dict.fromkeys((before, after) for before, after in pairs if before != after))


def put_control_edges(f: ir.Func, edges: Iterable[tuple[ir.Fragment, ir.Fragment]]) -> None:
    """Sets the control edges of a function to `edges`; its old ones are dropped."""
    befores: dict[ir.Fragment, list[ir.Fragment]] = {}
    for before, after in edges:
        befores.setdefault(after, []).append(before)
    sources = {before for group in befores.values() for before in group}
    number = {g: i for i, g in enumerate(g for g in ir.fragments(f) if g in sources)}
    for g in ir.fragments(f):
        _put_numbers(g, _IDS, [number[g]] if g in number else [])
        _put_numbers(g, _AFTER, sorted({number[b] for b in befores.get(g, [])}))


def keep_control_edges(parts: Sequence[ir.Fragment], merged: ir.Fragment) -> None:
    """Gives a merged fragment the edges of its parts, but for those between them."""
    ids = dict.fromkeys(number for part in parts for number in _numbers(part, _IDS))
    after = dict.fromkeys(number for part in parts for number in _numbers(part, _AFTER))
    _put_numbers(merged, _IDS, list(ids))
    _put_numbers(merged, _AFTER, [number for number in after if number not in ids])


def control_edges_as_operands(f: ir.Func) -> None:
    """Writes the control edges as the dialect does; the function does not verify afterwards.

    Edges from fragments without results have no such form and are lost.
    """
    place = {fragment: i for i, fragment in enumerate(ir.fragments(f))}
    befores: dict[int, list[int]] = {}
    for before, after in control_edges(f):
        befores.setdefault(place[after], []).append(place[before])
    put_control_edges(f, [])
    now = list(place)
    for i, earlier in befores.items():
        old = now[i]
        inputs = list(old.inputs)
        controls = [now[k].results[0] for k in earlier if now[k].results]
        now[i] = ir.rebuild(old, [*inputs, *controls], [r.type for r in old.results])
        ir.put(now[i], _START, ir.i64(len(inputs)))
        ir.replace(old, list(now[i].results))


def _numbers(g: ir.Fragment, name: str) -> list[int]:
    attribute = g.attributes.get(name)
    return [] if attribute is None else [ir.IntegerAttr(number).value for number in ir.ArrayAttr(attribute)]


def _put_numbers(g: ir.Fragment, name: str, numbers: Sequence[int]) -> None:
    ir.put(
        g, name, ir.ArrayAttr.get([ir.i64(number) for number in numbers], ir.context()) if numbers else None
    )


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
        reached: list[int] = []
        for needs in self.needs:
            bits = 0
            for j in needs:
                bits |= reached[j] | 1 << j
            reached.append(bits)
        return reached

    def path(self, source: ir.Op, target: ir.Op) -> list[ir.Op]:
        """A shortest path from `source` to `target` along data flow; empty if there is none."""
        start, end = self.place[source], self.place[target]
        came_from: dict[int, int] = {end: end}
        queue = [(0, end)]
        while queue:
            steps, i = heapq.heappop(queue)
            if i == start:
                positions = [i]
                while positions[-1] != end:
                    positions.append(came_from[positions[-1]])
                return [self.ops[j] for j in positions]
            for j in sorted(self.needs[i]):
                if j not in came_from:
                    came_from[j] = i
                    heapq.heappush(queue, (steps + 1, j))
        return []

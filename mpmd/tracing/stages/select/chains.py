"""The operations of a loss as a chain of units: what may be divided, what it costs, and what crosses."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from mpmd.cost.device import Device
from mpmd.jax_compat import scan_counts
from mpmd.tracing.stages.items import FlatFunction, Item, numbers
from mpmd.tracing.stages.select.division import (
    Chain,
    gradient_seconds,
    item_seconds,
    saved_bytes,
    work_factor,
)
from mpmd.tracing.stages.select.placement import size
from mpmd.tracing.stages.stacked.row_views import nested_loops
from mpmd.tracing.stages.stacked.scan_ranges import scans_over

_PARAMETERS, _DATA = 1, 2

_HEAVY = frozenset(("dot_general", "conv_general_dilated", "scan", "while", "sort", "fft"))
"""Operations that belong to the chain even if they read data alone."""


@dataclasses.dataclass(frozen=True)
class UnitChain:
    """A chain with the items that its units are of.

    Attributes:
        chain: costs and bytes.
        items: so that each is after what it reads, and branches follow one another.
        first: the first unit of each item.
        scans: the scans that may be divided → the stacked parameters that they run over; none for a loop
            whose iterations share their parameters.
        parameter_units: for each parameter the units that read it; rows of a stack are one each.
        batch: for each input that is data its bytes, and the units that read it.
        edges: the values that go from unit to unit.
    """

    chain: Chain
    items: tuple[Item, ...]
    first: tuple[int, ...]
    scans: Mapping[Item, frozenset[int]]
    parameter_units: Mapping[int, tuple[int, ...]]
    batch: tuple[tuple[int, tuple[int, ...]], ...] = ()
    edges: tuple[Edge, ...] = ()

    def nested_loops(self) -> list[Item]:
        """The loops that hold loops, and have much of the work."""
        work = dict(zip(self.items, self._work(), strict=True))
        return [loop for loop in nested_loops(self.items) if work[loop] > _MUCH * sum(self.chain.seconds)]

    def _work(self) -> Iterator[float]:
        for begin, end in itertools.pairwise((*self.first, len(self.chain))):
            yield sum(self.chain.seconds[begin:end])

    def iteration(self, at: int, unit: int) -> int:
        """The iteration of an item at which a unit begins."""
        item, begin = self.items[at], self.first[at]
        units = _units(item, self.scans)
        return -(-(unit - begin) * int(item.equation.params["length"]) // units) if units > 1 else 0

    def stages_of(self, at: int, starts: Sequence[int]) -> list[int]:
        """The stage of each iteration of a scan that may be divided, or of the whole item."""
        item, begin = self.items[at], self.first[at]
        if item not in self.scans:
            return [bisect.bisect_right(starts, begin)]
        units, length = _units(item, self.scans), int(item.equation.params["length"])
        return [bisect.bisect_right(starts, begin + k * units // length) for k in range(length)]

    def sent(self, starts: Sequence[int]) -> dict[tuple[int, int], int]:
        """(stage, stage that reads it) → bytes, for stages that begin at 0 and at `starts`."""
        values: dict[tuple[int, int], dict[int, int]] = {}
        for edge in self.edges:
            source = bisect.bisect_right(starts, edge.maker)
            for unit in edge.readers:
                target = bisect.bisect_right(starts, unit)
                if target != source:
                    values.setdefault((source, target), {})[edge.value] = edge.nbytes
        return {pair: sum(of.values()) for pair, of in sorted(values.items())}


@dataclasses.dataclass(frozen=True)
class Edge:
    """A value that units read.

    Attributes:
        value: its number.
        nbytes: its bytes.
        maker: the unit that computes it; of a scan the last.
        readers: the units that read it.
    """

    value: int
    nbytes: int
    maker: int
    readers: range


def chain_of(
    flat: FlatFunction,
    parameters: Sequence[int],
    device: Device,
    measured: Sequence[tuple[int, float]] = (),
) -> UnitChain:
    """The chain of a function.

    It has the items that read both parameters and data, directly or not, and heavy ones that read only data.
    The others need no stage of their own: what reads parameters alone is computed with its reader, and data
    is available on every mesh.

    Towers that a model computes in turns, a layer of each, are put one after the other where fewer bytes then
    cross.  What needs no gradient has no backward: it takes no time for one, and keeps nothing for it.

    Args:
        flat: its items have no stages.
        parameters: the inputs that are parameters.
        device: whose seconds it has.
        measured: (end, factor) of ranges of units, in order: measured seconds in units of the estimate.
    """
    items, constant = _trunk(flat, set(parameters))
    scans = _divisible_scans(flat, parameters, set(map(id, items)))
    scans |= _loops(items, scans)
    items = _by_branches(flat, items, scans)
    counts = [_units(item, scans) for item in items]
    first = _first_units(items, scans)
    trained, useful = _trained(flat, set(parameters))
    seconds: list[float] = []
    forward: list[float] = []
    residuals: list[int] = []
    for item, count in zip(items, counts, strict=True):
        factor = work_factor(item) if item in trained else 1.0
        kept = saved_bytes(item, flat.avals, constant) if item in trained else 0
        seconds += [item_seconds(item, device) * factor / count] * count
        forward += [item_seconds(item, device) / count] * count
        residuals += [kept // count] * count
    begin = 0
    for end, factor in measured:
        for of in (seconds, forward):
            of[begin:end] = [s * factor for s in of[begin:end]]
        begin = end
    units = _units_reading(flat, parameters, items, first, scans)
    data = [v for v in flat.inputs if v not in units]
    batch = _units_reading(flat, data, items, first, scans)
    owned = []
    for v, readers in units.items():
        rows = {row for item, stacks in scans.items() if v in stacks for row in _units_of(item, items, first)}
        share = len(rows) or 1
        nbytes = size(flat.avals[v]) // share
        parts: list[tuple[int, ...]] = [(row,) for row in sorted(rows)]
        for readers_of_part in parts or [readers]:
            gradient_s = gradient_seconds(nbytes, device) if v in useful else 0.0
            owned.append((nbytes, gradient_s, readers_of_part))
    crossing = _crossing(flat, items, first, scans)
    within = frozenset(
        unit for item, stacks in scans.items() if not stacks for unit in _units_of(item, items, first)[1:]
    )
    chain = Chain(seconds, crossing, residuals, owned, _fused(items, first), forward, within)
    read = tuple((size(flat.avals[v]), readers) for v, readers in batch.items() if readers)
    return UnitChain(chain, tuple(items), first[:-1], scans, units, read, _edges(flat, items, first, scans))


_FEWER = 0.9
"""Bytes that cross in another order of the items, over all places, in units of the order of the program."""


_MUCH = 0.1
"""Work of a loop that is worth unrolling, in units of all work."""

_LOOP_UNITS = 64
"""Units of a loop whose iterations share their parameters, at most: such as of one over time."""


def _units(item: Item, scans: Mapping[Item, frozenset[int]]) -> int:
    if item not in scans:
        return 1
    length = int(item.equation.params["length"])
    return length if scans[item] else min(length, _LOOP_UNITS)


def _loops(items: Sequence[Item], scans: Mapping[Item, frozenset[int]]) -> dict[Item, frozenset[int]]:
    """The loops of the chain over no stack: every iteration reads the same parameters."""
    return {
        item: frozenset()
        for item in items
        if item.equation.primitive.name == "scan" and item not in scans and item.equation.params["length"] > 1
    }


def _first_units(items: Sequence[Item], scans: Mapping[Item, frozenset[int]]) -> tuple[int, ...]:
    """The first unit of each item, and the end."""
    return (0, *itertools.accumulate(_units(item, scans) for item in items))


def _by_branches(flat: FlatFunction, items: list[Item], scans: Mapping[Item, frozenset[int]]) -> list[Item]:
    """The items of a branch one after the other, if fewer bytes cross so; else as they are."""
    maker = {v: at for at, item in enumerate(items) for v in item.outputs}
    order: list[Item] = []
    begun: set[int] = set()
    for last in reversed(range(len(items))):  # the whole of what it reads comes before it
        stack, tree = [(last, False)], []
        while stack:
            at, is_done = stack.pop()
            if is_done:
                tree.append(items[at])
            elif at not in begun:
                begun.add(at)
                stack.append((at, True))
                read = sorted({maker[v] for v in items[at].reads if v in maker} - {at}, reverse=True)
                stack += ((before, False) for before in read)
        order += tree
    in_turns, in_a_row = (sum(_crossing(flat, of, _first_units(of, scans), scans)) for of in (items, order))
    return order if in_a_row < _FEWER * in_turns else items


def _trained(flat: FlatFunction, parameters: set[int]) -> tuple[set[Item], set[int]]:
    """The items with a backward, and the values that the results depend on; none through `stop_gradient`."""
    through = [item for item in flat.items if item.equation.primitive.name != "stop_gradient"]
    useful = set(numbers(flat.outputs))
    for item in reversed(through):
        if not useful.isdisjoint(item.outputs):
            useful.update(item.reads)
    depends = set(parameters)
    trained = set()
    for item in through:
        if not depends.isdisjoint(item.reads):
            depends.update(item.outputs)
            if not useful.isdisjoint(item.outputs):
                trained.add(item)
    return trained, useful


def _trunk(flat: FlatFunction, parameters: set[int]) -> tuple[list[Item], set[int]]:
    """The items of the chain, and the values that are computed from parameters alone."""
    kinds = dict.fromkeys(flat.inputs, _DATA) | dict.fromkeys(parameters, _PARAMETERS)
    kinds |= dict.fromkeys(flat.constants, _DATA)
    items, only_parameters = [], []
    for item in flat.items:
        kind = 0
        for v in item.reads:
            kind |= kinds[v]
        if kind == _DATA and item.equation.primitive.name in _HEAVY:
            kind |= _PARAMETERS  # such as a tower of constants: what reads it comes after it in the chain
        kinds.update(dict.fromkeys(item.outputs, kind))
        if kind == _PARAMETERS | _DATA:
            items.append(item)
        elif kind == _PARAMETERS:
            only_parameters.append(item)
    if not items:  # the function has no data
        return only_parameters, set(parameters)
    return items, {v for v, kind in kinds.items() if kind == _PARAMETERS}


def _divisible_scans(
    flat: FlatFunction, parameters: Sequence[int], chain: set[int]
) -> dict[Item, frozenset[int]]:
    """The scans over stacked parameters whose rows one scan reads: its division says where they are."""
    out = {id(item) for item in flat.items if item.stays_out}
    divisible = {
        scan: stacks
        for scan, stacks in scans_over(flat, set(parameters), set(parameters)).items()
        if id(scan) in chain
    }
    for item in flat.items:
        item.stays_out = id(item) in out
    rows: collections.Counter[int] = collections.Counter()
    for scan, stacks in divisible.items():
        rows.update(dict.fromkeys(stacks, scan.equation.params["length"]))
    return {
        scan: frozenset(stacks)
        for scan, stacks in divisible.items()
        if all(rows[v] <= flat.avals[v].shape[0] for v in stacks)
    }


def _units_of(item: Item, items: Sequence[Item], first: Sequence[int]) -> range:
    at = next(i for i, other in enumerate(items) if other is item)
    return range(first[at], first[at + 1])


def _units_reading(
    flat: FlatFunction,
    inputs: Sequence[int],
    items: Sequence[Item],
    first: Sequence[int],
    scans: Mapping[Item, frozenset[int]],
) -> dict[int, tuple[int, ...]]:
    """The units that read each of some inputs, or values of no unit that are computed from it, in order."""
    sources = {v: frozenset((v,)) for v in inputs}
    position = {id(item): at for at, item in enumerate(items)}
    by_input: dict[int, set[int]] = {v: set() for v in inputs}
    for item in flat.items:
        read = frozenset[int]().union(*(sources.get(v, frozenset()) for v in item.reads))
        at = position.get(id(item))
        if at is None:
            sources.update(dict.fromkeys(item.outputs, read))
        else:
            for v in read:
                by_input[v].update(range(first[at], first[at + 1]) if item in scans else (first[at],))
    return {v: tuple(sorted(units)) for v, units in by_input.items()}


def _crossing(
    flat: FlatFunction, items: Sequence[Item], first: Sequence[int], scans: Mapping[Item, frozenset[int]]
) -> list[int]:
    """Bytes of the values of the chain that are alive before each unit."""
    made_by: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, item in enumerate(items):
        begin, end = first[at], first[at + 1] - 1
        constants, carried = scan_counts(item.equation.params) if item in scans else (0, 0)
        for position, v in enumerate(item.inputs):
            if isinstance(v, int):
                carry = constants <= position < constants + carried
                last[v] = max(last.get(v, 0), begin if carry else end)
        made_by.update(dict.fromkeys(item.outputs, end))
    changes = [0] * (first[-1] + 2)
    for v, unit in made_by.items():
        if last.get(v, -1) > unit:
            changes[unit + 1] += size(flat.avals[v])
            changes[last[v] + 1] -= size(flat.avals[v])
    crossing = list(itertools.accumulate(changes))[: first[-1] + 1]
    for at, item in enumerate(items):
        if item in scans:
            length = first[at + 1] - first[at]
            constants, carried = scan_counts(item.equation.params)
            carry_bytes = sum(size(flat.avals[v]) for v in item.outputs[:carried])
            rows = sum(size(flat.avals[v]) for v in numbers(item.outputs[carried:]) if v in last)
            for k in range(1, length):
                crossing[first[at] + k] += carry_bytes + rows * k // length
    return crossing


def _edges(
    flat: FlatFunction, items: Sequence[Item], first: Sequence[int], scans: Mapping[Item, frozenset[int]]
) -> tuple[Edge, ...]:
    """The values that items read of others, and what an iteration passes to the next."""
    maker = {v: first[at + 1] - 1 for at, item in enumerate(items) for v in item.outputs}
    edges = []
    for at, item in enumerate(items):
        begin, end = first[at], first[at + 1]
        constants, carried = scan_counts(item.equation.params) if item in scans else (0, 0)
        for position, v in enumerate(item.inputs):
            if isinstance(v, int) and v in maker:
                carry = constants <= position < constants + carried
                readers = range(begin, begin + 1 if carry else end)
                edges.append(Edge(v, size(flat.avals[v]), maker[v], readers))
        for v in numbers(item.outputs[:carried]):
            edges += (Edge(v, size(flat.avals[v]), k, range(k + 1, k + 2)) for k in range(begin, end - 1))
    return tuple(edges)


def _fused(items: Sequence[Item], first: Sequence[int]) -> frozenset[int]:
    """The units whose operation belongs into the kernel of the one before: elementwise, its only reader."""
    readers: dict[int, list[Item]] = {}
    for item in items:
        for v in dict.fromkeys(item.reads):
            readers.setdefault(v, []).append(item)
    fused = set()
    for at, (before, following) in enumerate(itertools.pairwise(items)):
        read = [readers[v] for v in before.outputs if v in readers]
        if read and all(of == [following] for of in read) and _is_elementwise(following):
            fused.add(first[at + 1])
    return frozenset(fused)


def _is_elementwise(item: Item) -> bool:
    name = item.equation.primitive.name
    return name not in _HEAVY and not name.startswith(
        ("reduce", "arg", "cum", "gather", "scatter", "dynamic", "concatenate", "cond", "custom", "top_k")
    )

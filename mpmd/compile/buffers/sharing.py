"""Values that can share memory: with their operands, with arguments that are donated, with results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpmd.compile.analysis.dataflow import Dataflow, HloValue
from mpmd.compile.analysis.liveness import LiveRange, Occupancy, loop_of, overwritten_pairs
from mpmd.compile.buffers.offsets import LiveBlock, Room
from mpmd.compile.hlo.attributes import InputOutputAlias
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule


def pair_donations(
    module: HloModule, donated: Sequence[int], may_share: MayShare
) -> tuple[InputOutputAlias, ...]:
    """Pairs of donated parameters and results of equal shape, as many as possible.

    Args:
        module: after all passes; parameters and results are arrays.
        donated: numbers of the parameters whose memory may be taken.
        may_share: which operands results may overwrite.
    """
    root = module.entry.root
    several = root.opcode == "tuple"
    results = list(root.operands) if several else [root]
    parameters = module.entry.parameters
    free = {parameters[number]: None for number in donated}
    pairs: dict[int, HloInstruction] = {}
    # First results whose kernel can write over the parameter: they need no memory besides it.  The others
    # are paired by shape, in order.
    for number, result in enumerate(results):
        for parameter in _computed_over(result, may_share):
            if parameter in free and parameter.shape.logical is result.shape.logical:
                pairs[number] = parameter
                del free[parameter]
                break
    for number, result in enumerate(results):
        if number not in pairs:
            fits = (p for p in free if p.shape.logical is result.shape.logical)
            taken = next(fits, None)
            if taken is not None:
                pairs[number] = taken
                del free[taken]
    return tuple(
        InputOutputAlias((number,) if several else (), pairs[number].parameter_number)
        for number in sorted(pairs)
    )


def _computed_over(result: HloInstruction, may_share: MayShare) -> list[HloInstruction]:
    """Parameters that the kernel of a result may overwrite with it, or must."""
    producer, number = _through(result), 0
    if producer.opcode == "get-tuple-element":
        producer, number = producer.operands[0], producer.tuple_index
    index = (number,) if producer.shape.is_tuple else ()
    in_place = [operand for operand, _, outer in overwritten_pairs(producer) if outer == index]
    sources = []
    for operand, value in enumerate(producer.operands):
        source = _through(value)
        if source.opcode == "parameter" and value.shape.is_array:
            if operand in in_place or may_share(producer, operand, number):
                sources.append(source)
    return sources


def _through(value: HloInstruction) -> HloInstruction:
    while value.opcode == "bitcast":
        value = value.operands[0]
    return value


ReusedSlice = tuple[int, int]
"""(number of an allocation, offset in it)."""


def reuse_outputs(blocks: Sequence[LiveBlock], rooms: Mapping[int, Room]) -> dict[int, ReusedSlice]:
    """Blocks that move into output buffers.

    The largest block that is in use at the peak moves first; then the peak is another.  The end is reached
    when no block at the peak fits.

    Args:
        blocks: the blocks of the arena.
        rooms: by number of the allocation; they are filled.

    Returns:
        The slice of each block that moved, by its number in `blocks`.
    """
    moved: dict[int, ReusedSlice] = {}
    if not rooms or not blocks:
        return moved
    in_use = np.zeros(max(b.spans[-1].end for b in blocks) + 1, np.int64)
    for block in blocks:
        for span in block.spans:
            in_use[span.start : span.end + 1] += block.size
    when = [b.instants for b in blocks]
    by_capacity = sorted(rooms, key=lambda r: (rooms[r].capacity or 0, r))
    waiting = sorted(range(len(blocks)), key=lambda k: (-blocks[k].size, k))
    # Only the peak decides the arena's size, so only blocks in use at the peak are moved; each is tried once,
    # as rooms only fill up.
    while in_use.max():
        instant = int(in_use.argmax())
        chosen = None
        for number in [k for k in waiting if when[k] >> instant & 1]:
            waiting.remove(number)
            slice_ = _find(blocks[number].size, when[number], by_capacity, rooms)
            if slice_ is not None:
                chosen, moved[number] = number, slice_
                break
        if chosen is None:
            break
        for span in blocks[chosen].spans:
            in_use[span.start : span.end + 1] -= blocks[chosen].size
    return moved


def _find(size: int, when: int, order: Sequence[int], rooms: Mapping[int, Room]) -> ReusedSlice | None:
    """The smallest allocation with room for a block, which is placed there."""
    for number in order:
        offset = rooms[number].place(size, when)
        if offset is not None:
            return number, offset
    return None


MayShare = Callable[[HloInstruction, int, int], bool]
"""(instruction, number of an operand, number of a result) → whether the result may overwrite the operand."""


@dataclass(frozen=True)
class CoalescingCandidate:
    """A coalescing candidate: two values, and when they may touch, both instants included."""

    a: HloValue
    b: HloValue
    touching: LiveRange


def space_of(value: HloValue) -> int:
    """The memory space of a value's layout: values of different spaces never share memory."""
    layout = value.shape.layout
    return layout.memory_space if layout is not None else 0


class Sharing:
    """Groups of values that share memory.

    Args:
        occupancy: when values are in use.
        interface: the allocation of each entry parameter and result.
        output_buffers: the allocation in which each result must end: it must not be in another's.
        may_share: which operands results may overwrite.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        interface: dict[HloValue, frozenset[int]],
        output_buffers: dict[HloValue, int],
        may_share: MayShare,
    ) -> None:
        self.occupancy = occupancy
        self.dataflow: Dataflow = occupancy.dataflow
        self._group: dict[HloValue, list[HloValue]] = {v: [v] for v in self.dataflow.values}
        self._interface = dict(interface)
        self._output_buffers = output_buffers
        self._fixed: dict[int, frozenset[int]] = {}
        for value, places in interface.items():
            self._fixed[id(self._group[value])] = places
        # The order is priority: updates in place, then loops and branches, which else copy each time they
        # run, then results that may overwrite operands.  A join that was made may rule out later ones.
        for candidate in (*self._in_place(), *self._joins(), *self._over_operands(may_share)):
            self._join(candidate)

    def groups(self) -> list[list[HloValue]]:
        """All groups, by their first value."""
        return list({id(g): g for g in (self._group[v] for v in self.dataflow.values)}.values())

    def _join(self, candidate: CoalescingCandidate) -> None:
        """Coalesce two values if their groups do not conflict."""
        a, b = self._group[candidate.a], self._group[candidate.b]
        place = self._fixed.get(id(a)) or self._fixed.get(id(b)) or frozenset()
        if a is b or not self._may_join(candidate, place):
            return
        # Lists are the groups' identity (`_fixed` is by id): the first list goes on, the second is dropped.
        a += b
        if place:
            self._fixed[id(a)] = place
        for value in b:
            self._group[value] = a

    def _may_join(self, candidate: CoalescingCandidate, place: frozenset[int]) -> bool:
        """Whether the groups of two values may share memory, that of the interface if one of them has it."""
        a, b = self._group[candidate.a], self._group[candidate.b]
        if "constant" in (candidate.a.instruction.opcode, candidate.b.instruction.opcode):
            return False
        if candidate.a.byte_size != candidate.b.byte_size or space_of(candidate.a) != space_of(candidate.b):
            return False
        # -1 stands for a result that has no single place; two groups with different places never join.
        if -1 in place or any(self._fixed.get(id(g), place) not in (frozenset(), place) for g in (a, b)):
            return False
        for x in a:
            for y in b:
                # The two values meet at the instant where one is read and the other written.  That is allowed
                # for this pair alone; all other pairs of the groups must not be in use at one instant.
                touching = candidate.touching if {x, y} == {candidate.a, candidate.b} else None
                if self.occupancy.conflict(x, y, touching):
                    return False
        if place and any(self._output_buffers.get(v) not in (None, *place) for v in (*a, *b)):
            return False
        return self._free_of_others(place, a, b)

    def _free_of_others(self, place: frozenset[int], a: list[HloValue], b: list[HloValue]) -> bool:
        """Whether all other values bound to an allocation of the interface are dead at the same time."""
        if not place:
            return True
        # An allocation of the interface holds several groups (a parameter, the result that takes its memory),
        # which need not be joined with each other, but must be dead while this one lives.
        others = {id(g): g for v, p in self._interface.items() if p == place for g in [self._group[v]]}
        return not any(
            self.occupancy.conflict(x, y)
            for g in others.values()
            if g is not a and g is not b
            for y in g
            for x in (*a, *b)
        )

    # -- candidates
    def _instructions(self) -> Iterator[HloInstruction]:
        for computation in self.dataflow.graph.sequential():
            yield from computation

    def _in_place(self) -> Iterator[CoalescingCandidate]:
        instants = self.occupancy.instants
        for instruction in self._instructions():
            for operand, inner, outer in overwritten_pairs(instruction):
                source = self.dataflow.value_at(instruction.operands[operand], inner)
                if not inner and not self._is_read_once(instruction, operand):
                    continue
                # a result that nothing reads is live for this instant alone, however long its operand is
                if not self.occupancy.ends_at(source, instants[instruction]):
                    continue
                yield CoalescingCandidate(
                    source, self.dataflow.value_at(instruction, outer), _at(instants[instruction])
                )

    def _is_read_once(self, instruction: HloInstruction, number: int) -> bool:
        """Whether the array of an operand is only one operand."""
        value = self.dataflow.value_at(instruction.operands[number])
        others = (o for k, o in enumerate(instruction.operands) if k != number and o.shape.is_array)
        return not any(self.dataflow.value_at(o) is value for o in others)

    def _joins(self) -> Iterator[CoalescingCandidate]:
        """Joins at loops and branches: state with the body's result and with the initial value."""
        spans, instants = self.occupancy.liveness.time.spans, self.occupancy.instants
        phis = [v for v in self.dataflow.values if v.is_phi]
        for phi in phis:
            loop = loop_of(phi)
            if loop is not None:
                result = self.dataflow.value_at(loop.while_body.root, phi.index)
                yield CoalescingCandidate(phi, result, _at(instants[loop]))
                # The initial value may share the state's memory until the condition first runs.
                begun = self.dataflow.value_at(loop.operands[0], phi.index)
                yield CoalescingCandidate(phi, begun, _at(spans[loop.while_condition].start))
            elif phi.instruction.opcode == "conditional":
                for branch in phi.instruction.called:
                    result = self.dataflow.value_at(branch.root, phi.index)
                    yield CoalescingCandidate(phi, result, _at(spans[branch].end))

    def _over_operands(self, may_share: MayShare) -> list[CoalescingCandidate]:
        """Results over operands; first those that are then where they must end, in a parameter's memory."""
        candidates = list(self._written_over(may_share))
        return sorted(
            candidates, key=lambda c: self._output_buffers.get(c.b) not in self._interface.get(c.a, ())
        )

    def _written_over(self, may_share: MayShare) -> Iterator[CoalescingCandidate]:
        instants = self.occupancy.instants
        for instruction in self._instructions():
            leaves = [i for i, _ in instruction.shape.leaves()]
            for number, operand in enumerate(instruction.operands):
                if not operand.shape.is_array:
                    continue
                source = self.dataflow.value_at(operand)
                now = instants[instruction]
                # Written over only if this is the last read, and if no other operand is the same array: the
                # kernel may read that one at a later point of its loop.
                if self.occupancy.last(source) != now or not self._is_read_once(instruction, number):
                    continue
                for result, index in enumerate(leaves):
                    value = self.dataflow.value_at(instruction, index)
                    if value.instruction is not instruction or value.byte_size != source.byte_size:
                        continue
                    if may_share(instruction, number, result):
                        yield CoalescingCandidate(source, value, _at(now))


def _at(instant: int) -> LiveRange:
    return LiveRange(instant, instant)

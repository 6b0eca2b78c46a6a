"""Which instructions of a program run together: levels, whose kinds take turns.

    native ── native beside collectives ── XLA ── loops ── native ── ...

An instruction is on the first level of its kind after all of its operands, so that dependences have no cycle
and there are as few parts as possible; a native one is moved to its first reader if that part then reads no
more bytes.  Constants, values computed of them alone, and values larger than their operand are on no level:
each part that reads them computes them.

Source: the marking of clusters for compilation in TensorFlow, `mark_for_compilation_pass.cc`: grow greedily,
    without cycles, not too small.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from mpmd.compile.analysis.dataflow import FORWARDING, Position
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import ShapeIndex
from mpmd.compile.kernels.planner.collectives import COLLECTIVES

MIN_OPERATIONS = 4
"""Native clusters with fewer instructions are XLA's: a call would cost more than they bring."""

_CHEAP = frozenset(("broadcast", "convert", "iota", "reshape", "slice", "transpose"))
_WIDENING = frozenset(("broadcast", "convert", "reshape"))
_WORTHY = frozenset(("dot", "reduce", "reduce-window", "sort", "while", "conditional"))

_MAX_COPIED = 16
"""Instructions that a part repeats for one that it reads, at most."""

_PLACELESS = frozenset(("parameter", "constant", "tuple", "get-tuple-element"))

NATIVE, BESIDE, XLA, LOOP, KINDS = 0, 1, 2, 3, 4
"""Kinds of instructions, which levels have in turn, and how many; `BESIDE` is native, too."""


def working(members: Sequence[HloInstruction]) -> list[HloInstruction]:
    """Those that do something when the program runs."""
    return [m for m in members if m.opcode not in FORWARDING]


@dataclass(frozen=True)
class Levels:
    """The instructions of a program that are on a level.

    Attributes:
        groups: by level, in an order in which they can run.
        reads: the arrays that each of them reads, itself or by its operands on no level.
    """

    groups: Mapping[int, Sequence[HloInstruction]]
    reads: Mapping[HloInstruction, Sequence[Position]]


def levels_of(
    module: HloModule, refused: Collection[HloInstruction], loops: Collection[HloInstruction]
) -> Levels:
    """The levels of the entry of a program; see `clusters.split`."""
    results = arrays_of(module.entry.root)
    states = [at for loop in loops for at in arrays_of(loop.operands[0])]
    copied = _copied(module.entry.post_order(), [*results, *states], refused)
    # Parameters and tuples do nothing; copied values are repeated in each part that reads them.
    order = [i for i in module.entry.post_order() if i.opcode not in _PLACELESS and i not in copied]
    reads = {i: _arrays_read(i.operands, copied) for i in order}
    kinds = {i: LOOP if i in loops else XLA if i in refused else NATIVE for i in order}
    for instruction in order:  # an op that forwards a value is in the part of its operand
        sources = [producer for producer, _ in reads[instruction] if producer in kinds]
        if instruction.opcode in FORWARDING and sources:
            kinds[instruction] = min(kinds[sources[0]], XLA)
    _move_fringe(order, reads, kinds)
    groups = _grouped(order, reads, results, kinds)
    # XLA takes over native groups that are not worth a call. That moves other instructions to other levels,
    # which may leave further groups small: until none is. Each round has fewer native instructions.
    while small := [n for n, members in groups.items() if n % KINDS == NATIVE and not _is_worth(members)]:
        for level in small:
            kinds.update(dict.fromkeys(groups[level], XLA))
        groups = _grouped(order, reads, results, kinds)
    return Levels(_beside_collectives(groups, reads), reads)


def _copied(
    order: Sequence[HloInstruction], results: Sequence[Position], refused: Collection[HloInstruction]
) -> set[HloInstruction]:
    """Values that each part computes again: those that read no array, and those larger than their operand."""
    # A result of the program is an array of one part, and a refused instruction runs in one part only.
    kept = {*refused, *(producer for producer, _ in results)}
    sizes = {i: 0 for i in order if i.opcode == "constant"}
    without = set(sizes)
    for instruction in order:
        operands, opcode = instruction.operands, instruction.opcode
        size = 1 + sum(sizes.get(operand, 0) for operand in operands)
        if instruction in kept or instruction in sizes or size > _MAX_COPIED:
            continue
        # Reads no array: computed anew wherever it is wanted, up to `_MAX_COPIED` instructions with all
        # that it is made of.
        if opcode == "iota" or (
            (opcode in _CHEAP or instruction.is_elementwise) and operands and without.issuperset(operands)
        ):
            without.add(instruction)
        # A broadcast is repeated, because its operand is the smaller array to pass between parts.
        elif opcode not in _WIDENING or operands[0].shape.byte_size > instruction.shape.byte_size:
            continue
        sizes[instruction] = size
    return set(sizes)


def _arrays_read(operands: Sequence[HloInstruction], copied: Set[HloInstruction]) -> list[Position]:
    arrays = []
    for operand in operands:
        for producer, index in arrays_of(operand):
            arrays += _arrays_read(producer.operands, copied) if producer in copied else [(producer, index)]
    return arrays


def arrays_of(value: HloInstruction) -> list[Position]:
    """The arrays of a value, where they are made: not in tuples that hold them."""
    return [made_at(value, index) for index, _ in value.shape.leaves()]


def made_at(value: HloInstruction, index: ShapeIndex) -> Position:
    """Where a part of a value is made, outside of tuples."""
    while True:
        if value.opcode == "get-tuple-element":
            value, index = value.operands[0], (value.tuple_index, *index)
        elif value.opcode == "tuple":
            value, index = value.operands[index[0]], index[1:]
        else:
            return value, index


def _move_fringe(
    order: Sequence[HloInstruction],
    reads: Mapping[HloInstruction, Sequence[Position]],
    kinds: dict[HloInstruction, int],
) -> None:
    """Cheap work that only XLA reads is XLA's: its result is larger than its operands."""
    users: dict[HloInstruction, list[HloInstruction]] = {}
    for instruction in order:
        for producer, _ in reads[instruction]:
            users.setdefault(producer, []).append(instruction)
    # Readers come first, so that chains of cheap operations move as a whole.
    for instruction in reversed(order):
        readers = users.get(instruction, [])
        if instruction.opcode in _CHEAP and readers and all(kinds[u] != NATIVE for u in readers):
            kinds[instruction] = XLA


def _grouped(
    order: Sequence[HloInstruction],
    reads: Mapping[HloInstruction, Sequence[Position]],
    results: Collection[Position],
    kinds: Mapping[HloInstruction, int],
) -> dict[int, list[HloInstruction]]:
    """Instructions by level: a level has one kind, and comes after all that it needs."""
    levels: dict[HloInstruction, int] = {}
    for instruction in order:
        kind = level = kinds[instruction]
        for before in (*(producer for producer, _ in reads[instruction]), *instruction.control_predecessors):
            if before in levels:
                # Levels count round after round through the kinds: the distance to the next level of this
                # kind, none if `before` is on one. Loops are parts of their own, and one that needs another
                # is a whole round later.
                further = (kind - levels[before]) % KINDS or (KINDS if kind == LOOP else 0)
                level = max(level, levels[before] + further)
        levels[instruction] = level
    _sink(order, reads, results, kinds, levels)
    groups: dict[int, list[HloInstruction]] = {}
    for instruction in order:
        groups.setdefault(levels[instruction], []).append(instruction)
    return groups


def _sink(
    order: Sequence[HloInstruction],
    reads: Mapping[HloInstruction, Sequence[Position]],
    results: Collection[Position],
    kinds: Mapping[HloInstruction, int],
    levels: dict[HloInstruction, int],
) -> None:
    """Moves native instructions to the cluster of their first reader; parameters are there in any case."""
    readers: dict[HloInstruction, list[int]] = {}
    for producer, _ in results:
        readers.setdefault(producer, []).append(levels.get(producer, 0))
    uses = collections.Counter(producer for i in order for producer in {p for p, _ in reads[i]})
    uses.update(list(readers))
    inner = {i for i in order if uses[i] == 1 and i.is_elementwise and kinds[i] == NATIVE}
    # Readers are placed before what they read. The move is to the native level of the round of the first
    # reader, and only if the operands that then pass between parts are no larger than the result that no
    # longer does.
    for instruction in reversed(order):
        before = dict.fromkeys(producer for producer, _ in reads[instruction])
        later = readers.get(instruction, ())
        passing = _sources(instruction, reads, inner) if instruction.is_elementwise else before
        size = sum(producer.shape.byte_size for producer in passing if producer.opcode != "parameter")
        if kinds[instruction] == NATIVE and later and size <= instruction.shape.byte_size:
            levels[instruction] = max(levels[instruction], min(later) - min(later) % KINDS)
        # What must run before this instruction must not move behind it, either.
        for producer in (*before, *instruction.control_predecessors):
            readers.setdefault(producer, []).append(levels[instruction])


def _sources(
    instruction: HloInstruction,
    reads: Mapping[HloInstruction, Sequence[Position]],
    inner: Collection[HloInstruction],
) -> list[HloInstruction]:
    """What an instruction is computed from, through values that nothing else reads: they move with it."""
    found: dict[HloInstruction, None] = {}
    waiting = [instruction]
    while waiting:
        for producer, _ in reads[waiting.pop()]:
            if producer not in found:
                found[producer] = None
                if producer in inner:
                    waiting.append(producer)
    return [producer for producer in found if producer not in inner]


def _beside_collectives(
    groups: Mapping[int, Sequence[HloInstruction]], reads: Mapping[HloInstruction, Sequence[Position]]
) -> dict[int, Sequence[HloInstruction]]:
    """Levels in which products that the collectives of the next one do not wait for are on their own.

    XLA starts the collectives, and calls these parts before it waits for them.  Where some collectives have
    readers and others give results, the products may be operands of the latter.
    """
    divided = dict(groups)
    for level, members in groups.items():
        following = groups.get(level + XLA, ()) if level % KINDS == NATIVE else ()
        if not any(m.opcode in COLLECTIVES for m in following):
            continue
        # Of this level, what later levels wait for stays, with all that it is made of; the rest is work
        # that collectives can hide.
        needed = _awaited(level + XLA, groups, reads)
        for instruction in reversed(members):
            if instruction in needed:
                needed.update(producer for producer, _ in reads[instruction])
        first, rest = ([m for m in members if (m in needed) == wanted] for wanted in (True, False))
        if _is_worth(first) and any(m.opcode == "dot" for m in rest):
            divided[level], divided[level + BESIDE] = first, rest
    return divided


def _awaited(
    level: int,
    groups: Mapping[int, Sequence[HloInstruction]],
    reads: Mapping[HloInstruction, Sequence[Position]],
) -> set[HloInstruction]:
    """Operands of a level whose results later levels read; of all of it if none do."""
    later = {
        producer for n, members in groups.items() if n > level for m in members for producer, _ in reads[m]
    }
    for instruction in reversed(groups[level]):
        if instruction in later:
            later.update(producer for producer, _ in reads[instruction])
    read = [m for m in groups[level] if m in later] or groups[level]
    return {producer for m in read for producer, _ in reads[m]}


def _is_worth(members: Sequence[HloInstruction]) -> bool:
    doing = working(members)
    return len(doing) >= MIN_OPERATIONS or any(m.opcode in _WORTHY for m in doing)

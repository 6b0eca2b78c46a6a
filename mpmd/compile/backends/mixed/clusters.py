"""A prepared program as clusters: parts that are native code and parts that are XLA's, one after the other.

    native 0 ──▶ XLA 1 ──▶ native 2 ──▶ ...

An instruction is in the first cluster of its kind after all of its operands, so that dependences between
clusters have no cycle and there are as few clusters as possible; a native one is moved to its first reader if
that cluster then reads no more bytes.  Constants, what is computed of them alone, and what is larger than its
operand are copied into each cluster that uses them.  A loop that native code covers in part is a cluster of
its own: XLA's loop, with clusters inside.

Source: the marking of clusters for compilation in TensorFlow, `mark_for_compilation_pass.cc`: grow greedily,
    without cycles, not too small.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from mpmd.compile.analysis.dataflow import FORWARDING, Position
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import ShapeIndex, tuple_of
from mpmd.compile.kernels.planning.collectives import COLLECTIVES

MIN_OPERATIONS = 4
"""Native clusters with fewer instructions are XLA's: a call would cost more than they bring."""

_CHEAP = frozenset(("broadcast", "convert", "iota", "reshape", "slice", "transpose"))
_WIDENING = frozenset(("broadcast", "convert", "reshape"))
_WORTHY = frozenset(("dot", "reduce", "reduce-window", "sort", "while", "conditional"))

_PLACELESS = frozenset(("parameter", "constant", "tuple", "get-tuple-element"))

_NATIVE, _BESIDE, _XLA, _LOOP, _KINDS = 0, 1, 2, 3, 4
"""Kinds of instructions, which levels have in turn, and how many; `_BESIDE` is native, too."""


@dataclass(frozen=True)
class LoopClusters:
    """A loop in parts.

    Attributes:
        condition: a program of the arrays of the state, whose only result says whether the body runs again.
        body: one whose results are the next state.
        trips: how often it runs, if that is known, or else 1.
    """

    condition: Clusters
    body: Clusters
    trips: int


@dataclass(frozen=True)
class Cluster:
    """A part of a program.

    Attributes:
        native: whether it is native code.
        members: its instructions, in an order in which they can run.
        inputs: arrays that it reads.
        outputs: arrays of its own that others read.
        last_reads: numbers of inputs that nothing reads after it: their memory may be taken.
        module: the part as a program of its own: parameters are the inputs, the result the outputs.
        reasons: why there is no native code, for each of its instructions that should have it.
        loop: its parts if it is one loop: inputs and outputs are the arrays of its state.
    """

    native: bool
    members: tuple[HloInstruction, ...]
    inputs: tuple[Position, ...]
    outputs: tuple[Position, ...]
    last_reads: tuple[int, ...]
    module: HloModule
    reasons: Mapping[str, str]
    loop: LoopClusters | None = None

    @property
    def has_effect(self) -> bool:
        """Whether it does more than to give its outputs."""
        return any(m.has_side_effect for m in self.members)

    def text(self, number: int) -> str:
        """A line, one for each refused instruction, and the clusters of a loop's body."""
        kind = "native" if self.native else "XLA" if self.loop is None else "loop"
        lines = [
            f"cluster {number}: {kind}, {len(working(self.members))} instructions, "
            f"{len(self.inputs)} inputs, {len(self.outputs)} outputs"
        ]
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        if self.loop is not None:
            lines += [f"  {line}" for line in self.loop.body.text().splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Clusters:
    """A program in parts.

    Attributes:
        parts: in the order in which they run.
        arguments: the arrays of its parameters.
        results: where the arrays of the program's result are: outputs of parts, parameters, constants.
    """

    parts: tuple[Cluster, ...]
    arguments: tuple[Position, ...]
    results: tuple[Position, ...]

    @property
    def has_native(self) -> bool:
        """Whether something in it is native code."""
        return any(p.native or (p.loop is not None and p.loop.body.has_native) for p in self.parts)

    @property
    def reasons(self) -> list[str]:
        """Why there is no native code, instruction by instruction."""
        found = []
        for part in self.parts:
            found += [f"{name}: {reason}" for name, reason in part.reasons.items()]
            found += part.loop.body.reasons if part.loop is not None else []
        return found

    @property
    def refused(self) -> int:
        """How many parts should be native code, and are not."""
        inside = sum(part.loop.body.refused for part in self.parts if part.loop is not None)
        return inside + sum(bool(part.reasons) for part in self.parts)

    def text(self) -> str:
        """One line per cluster, and under it one for each refused instruction."""
        return "\n".join(part.text(number) for number, part in enumerate(self.parts)) + "\n"


def working(members: Sequence[HloInstruction]) -> list[HloInstruction]:
    """Those that do something when the program runs."""
    return [m for m in members if m.opcode not in FORWARDING]


def split(
    module: HloModule,
    refused: Mapping[HloInstruction, str],
    loops: Mapping[HloInstruction, LoopClusters] = MappingProxyType({}),
) -> Clusters:
    """The clusters of a program.

    Args:
        module: after `pipelines.preparation`; it stays as it is.
        refused: instructions of its entry that have no native code → why; "" for those that are meant to be
            XLA's.
        loops: loops of its entry that are clusters of their own.
    """
    results = tuple(_arrays(module.entry.root))
    states = [at for loop in loops for at in _arrays(loop.operands[0])]
    copied = _copied(module.entry.post_order(), [*results, *states], refused)
    order = [i for i in module.entry.post_order() if i.opcode not in _PLACELESS and i not in copied]
    reads = {i: _arrays_read(i.operands, copied) for i in order}
    kinds = {i: _LOOP if i in loops else _XLA if i in refused else _NATIVE for i in order}
    for instruction in order:  # an op that forwards a value is in the cluster of its operand
        sources = [made for made, _ in reads[instruction] if made in kinds]
        if instruction.opcode in FORWARDING and sources:
            kinds[instruction] = min(kinds[sources[0]], _XLA)
    _move_fringe(order, reads, kinds)
    groups = _grouped(order, reads, results, kinds)
    while small := [n for n, members in groups.items() if n % _KINDS == _NATIVE and not _is_worth(members)]:
        for level in small:
            kinds.update(dict.fromkeys(groups[level], _XLA))
        groups = _grouped(order, reads, results, kinds)
    work = _Division(module, _beside_collectives(groups, reads), reads, results, refused, loops)
    arguments = [(p, index) for p in module.entry.parameters for index, _ in p.shape.leaves()]
    return Clusters(tuple(work.parts()), tuple(arguments), results)


def _copied(
    order: Sequence[HloInstruction], results: Sequence[Position], refused: Collection[HloInstruction]
) -> set[HloInstruction]:
    """What each cluster makes again: what reads no array, as masks, and what is larger than its operand."""
    kept = {*refused, *(made for made, _ in results)}
    found = {i for i in order if i.opcode == "constant"}
    without = set(found)
    for instruction in order:
        if instruction in kept or instruction in found:
            continue
        operands, opcode = instruction.operands, instruction.opcode
        if opcode == "iota" or (
            (opcode in _CHEAP or instruction.is_elementwise) and operands and without.issuperset(operands)
        ):
            without.add(instruction)
        elif opcode not in _WIDENING or operands[0].shape.byte_size > instruction.shape.byte_size:
            continue
        found.add(instruction)
    return found


def _arrays_read(operands: Sequence[HloInstruction], copied: Set[HloInstruction]) -> list[Position]:
    """The arrays that an instruction and what is copied before it read."""
    found = []
    for operand in operands:
        for made, index in _arrays(operand):
            found += _arrays_read(made.operands, copied) if made in copied else [(made, index)]
    return found


def _arrays(value: HloInstruction) -> list[Position]:
    """The arrays of a value, where they are made: not in tuples that hold them."""
    return [_made_at(value, index) for index, _ in value.shape.leaves()]


def _made_at(value: HloInstruction, index: ShapeIndex) -> Position:
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
        for made, _ in reads[instruction]:
            users.setdefault(made, []).append(instruction)
    for instruction in reversed(order):
        readers = users.get(instruction, [])
        if instruction.opcode in _CHEAP and readers and all(kinds[u] != _NATIVE for u in readers):
            kinds[instruction] = _XLA


def _grouped(
    order: Sequence[HloInstruction],
    reads: Mapping[HloInstruction, Sequence[Position]],
    results: Collection[Position],
    kinds: Mapping[HloInstruction, int],
) -> dict[int, list[HloInstruction]]:
    """Instructions by level, each of which has one kind, none before what it needs, loops after it."""
    levels: dict[HloInstruction, int] = {}
    for instruction in order:
        kind = level = kinds[instruction]
        for before in (*(made for made, _ in reads[instruction]), *instruction.control_predecessors):
            if before in levels:
                further = (kind - levels[before]) % _KINDS or (_KINDS if kind == _LOOP else 0)
                level = max(level, levels[before] + further)
        levels[instruction] = level
    _sink(order, reads, results, kinds, levels)
    found: dict[int, list[HloInstruction]] = {}
    for instruction in order:
        found.setdefault(levels[instruction], []).append(instruction)
    return found


def _sink(
    order: Sequence[HloInstruction],
    reads: Mapping[HloInstruction, Sequence[Position]],
    results: Collection[Position],
    kinds: Mapping[HloInstruction, int],
    levels: dict[HloInstruction, int],
) -> None:
    """Moves native instructions to the cluster of their first reader; parameters are there in any case."""
    readers: dict[HloInstruction, list[int]] = {}
    for made, _ in results:
        readers.setdefault(made, []).append(levels.get(made, 0))
    for instruction in reversed(order):
        before = dict.fromkeys(made for made, _ in reads[instruction])
        later = readers.get(instruction, ())
        size = sum(made.shape.byte_size for made in before if made.opcode != "parameter")
        if kinds[instruction] == _NATIVE and later and size <= instruction.shape.byte_size:
            levels[instruction] = max(levels[instruction], min(later) - min(later) % _KINDS)
        for made in (*before, *instruction.control_predecessors):
            readers.setdefault(made, []).append(levels[instruction])


def _beside_collectives(
    groups: Mapping[int, Sequence[HloInstruction]], reads: Mapping[HloInstruction, Sequence[Position]]
) -> dict[int, Sequence[HloInstruction]]:
    """Levels in which products that the collectives of the next one do not wait for are on their own.

    XLA starts the collectives, and calls these parts before it waits for them.  Where some collectives have
    readers and others give results, the products may be operands of the latter.
    """
    found = dict(groups)
    for level, members in groups.items():
        following = groups.get(level + _XLA, ()) if level % _KINDS == _NATIVE else ()
        if not any(m.opcode in COLLECTIVES for m in following):
            continue
        needed = _awaited(level + _XLA, groups, reads)
        for instruction in reversed(members):
            if instruction in needed:
                needed.update(made for made, _ in reads[instruction])
        first, rest = ([m for m in members if (m in needed) == wanted] for wanted in (True, False))
        if _is_worth(first) and any(m.opcode == "dot" for m in rest):
            found[level], found[level + _BESIDE] = first, rest
    return found


def _awaited(
    level: int,
    groups: Mapping[int, Sequence[HloInstruction]],
    reads: Mapping[HloInstruction, Sequence[Position]],
) -> set[HloInstruction]:
    """Operands of a level whose results later levels read; of all of it if none do."""
    later = {made for n, members in groups.items() if n > level for m in members for made, _ in reads[m]}
    for instruction in reversed(groups[level]):
        if instruction in later:
            later.update(made for made, _ in reads[instruction])
    read = [m for m in groups[level] if m in later] or groups[level]
    return {made for m in read for made, _ in reads[m]}


def _is_worth(members: Sequence[HloInstruction]) -> bool:
    doing = working(members)
    return len(doing) >= MIN_OPERATIONS or any(m.opcode in _WORTHY for m in doing)


@dataclass(frozen=True)
class _Division:
    """A program, and which of its instructions are together.

    Attributes:
        module: the program.
        groups: its instructions by level.
        reads: the arrays that each of them reads.
        results: the arrays of its result.
        refused: see `split`.
        loops: likewise.
    """

    module: HloModule
    groups: Mapping[int, Sequence[HloInstruction]]
    reads: Mapping[HloInstruction, Sequence[Position]]
    results: Sequence[Position]
    refused: Mapping[HloInstruction, str]
    loops: Mapping[HloInstruction, LoopClusters]

    def parts(self) -> Iterator[Cluster]:
        """The clusters that give or do something, level by level."""
        for level, members in sorted(self.groups.items()):
            kind = level % _KINDS
            if kind == _LOOP:
                yield from (self._cluster([loop], native=False, loop=self.loops[loop]) for loop in members)
                continue
            part = self._cluster(members, native=kind in (_NATIVE, _BESIDE))
            if part.outputs or part.has_effect:
                yield part

    def _cluster(
        self, members: Sequence[HloInstruction], *, native: bool, loop: LoopClusters | None = None
    ) -> Cluster:
        """Some instructions with the parameters and results of their cluster."""
        reads, inside = self.reads, set(members)
        given = [at for m in members for at in reads[m]] if loop is None else _arrays(members[0].operands[0])
        outputs = [(m, index) for m in members for index, _ in m.shape.leaves()]
        inputs = [
            at for at in given if at[0] not in inside and (at[0] in reads or at[0].opcode == "parameter")
        ]
        inputs = list(dict.fromkeys(inputs))
        part = _Part(self.module, inputs)
        if loop is None:
            elsewhere = {at for i, positions in reads.items() if i not in inside for at in positions}
            outputs = [at for at in outputs if at in elsewhere or at in self.results]
        else:
            inputs = given
        program = part.program(members, outputs)
        reasons = {m.name: self.refused[m] for m in members if self.refused.get(m)}
        last = self._last_reads(inputs, members)
        return Cluster(native, tuple(members), tuple(inputs), tuple(outputs), last, program, reasons, loop)

    def _last_reads(self, inputs: Sequence[Position], members: Sequence[HloInstruction]) -> tuple[int, ...]:
        """The inputs of a cluster all of whose other readers are needed before it.

        Without such a dependence XLA may order a reader after the cluster, for which it would copy the array.
        """
        reads, groups = self.reads, self.groups
        together = {i: group for level, group in groups.items() if level % _KINDS <= _BESIDE for i in group}
        before = set(members)
        todo = [made for made, _ in inputs]
        while todo:
            instruction = todo.pop()
            if instruction not in before:
                for needed in together.get(instruction, (instruction,)):
                    before.add(needed)
                    todo += [made for made, _ in reads.get(needed, ())]
        later = {at for i, positions in reads.items() if i not in before for at in positions}
        return tuple(k for k, at in enumerate(inputs) if at not in later and at not in self.results)


class _Part:
    """A cluster as a program, in the making.

    Args:
        module: the whole program.
        inputs: arrays that become parameters.
    """

    def __init__(self, module: HloModule, inputs: Iterable[Position]) -> None:
        self.module = module.clone()
        self.module.input_output_alias, self.module.buffer_donor = (), ()
        self.module.parameter_layouts = self.module.result_layout = None
        self.twins = {i.uid: i for i in self.module.entry}
        self.body = self.module.create_computation("cluster")
        self.copies: dict[HloInstruction, HloInstruction] = {}
        self.given: dict[Position, HloInstruction] = {}
        for number, (made, index) in enumerate(inputs):
            # between clusters arrays are row-major, however a library's call makes them
            shape = made.subshape(index).with_default_layout()
            parameter = HloInstruction("parameter", shape, (), {"parameter_number": number})
            self.given[made, index] = self.body.add(parameter)

    def program(self, members: Sequence[HloInstruction], outputs: Sequence[Position]) -> HloModule:
        """The program whose result are the outputs, in order."""
        for member in members:
            operands = [self._value(operand, ()) for operand in member.operands]
            self.copies[member] = self.body.add(self.twins[member.uid].clone(operands))
        results = [self._array(position) for position in outputs]
        shape = tuple_of([r.shape for r in results])
        self.body.set_root(self.body.add(HloInstruction("tuple", shape, results)))
        self.module.set_entry(self.body)
        self.module.remove_unreached()
        return self.module

    def _value(self, original: HloInstruction, index: ShapeIndex) -> HloInstruction:
        """A value, put together of its arrays."""
        shape = original.subshape(index)
        if not shape.is_tuple:
            return self._array(_made_at(original, index))
        parts = [self._value(original, (*index, k)) for k in range(len(shape.elements))]
        return self.body.add(HloInstruction("tuple", shape, parts))

    def _array(self, position: Position) -> HloInstruction:
        """An array: a parameter, a copy, or a part of what a member makes."""
        if position in self.given:
            return self.given[position]
        value, index = position
        if value not in self.copies:
            operands = [self._value(operand, ()) for operand in value.operands]
            self.copies[value] = self.body.add(self.twins[value.uid].clone(operands))
        made = self.copies[value]
        for number in index:
            shape = made.shape.subshape((number,))
            made = self.body.add(HloInstruction("get-tuple-element", shape, [made], {"index": number}))
        return made

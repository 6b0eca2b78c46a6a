"""A prepared program as clusters: parts that are native code and parts that are XLA's, one after the other.

    native 0 ──▶ XLA 1 ──▶ native 2 ──▶ ...

`levels.py` says which instructions are together.  A loop that native code covers in part is a cluster of its
own: XLA's loop, with clusters inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from mpmd.compile.analysis.dataflow import Position
from mpmd.compile.backends.mixed.levels import (
    BESIDE,
    KINDS,
    LOOP,
    NATIVE,
    arrays_of,
    levels_of,
    made_at,
    working,
)
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import ShapeIndex, tuple_of
from mpmd.compile.passes.simplify.while_loops import Counter, counter_of
from mpmd.compile.thunks.emission import Refuses, refusals


def divide(
    module: HloModule, refuses: Refuses, left: Collection[str], counter: Counter | None = None
) -> Clusters:
    """The clusters of a program, in which a loop with some of the instructions that are left is one of them.

    Args:
        module: after `pipelines.preparation`; it stays as it is.
        refuses: of the target.
        left: opcodes of instructions that are meant to be XLA's.
        counter: of the loop whose body it is.
    """
    refused: dict[HloInstruction, str] = {}
    loops: dict[HloInstruction, LoopClusters] = {}
    for instruction, reason in refusals(module.entry, refuses).items():
        loop = _loop(instruction, refuses, left) if left and instruction.opcode == "while" else None
        if loop is not None and loop.body.has_native:
            loops[instruction] = loop
        elif instruction.opcode in left or (loop is not None and not loop.body.reasons):
            refused[instruction] = ""
        else:
            refused[instruction] = reason
    if counter is not None:  # XLA knows how often its loop runs if it sees how it counts
        refused[module.entry.root.operands[counter.index]] = ""
    return split(module, refused, loops)


def _loop(loop: HloInstruction, refuses: Refuses, left: Collection[str]) -> LoopClusters:
    counter = counter_of(loop)
    condition, body = map(_as_program, (loop.while_condition, loop.while_body))
    return LoopClusters(
        split(condition, dict.fromkeys(condition.entry, "")),
        divide(body, refuses, left, counter),
        counter.trips if counter is not None else 1,
    )


def _as_program(computation: HloComputation) -> HloModule:
    module = computation.module.clone()
    module.input_output_alias, module.buffer_donor = (), ()
    module.parameter_layouts = module.result_layout = None
    module.set_entry(module.computation(computation.name))
    module.remove_unreached()
    return module


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
        lines = []
        for part in self.parts:
            lines += [f"{name}: {reason}" for name, reason in part.reasons.items()]
            lines += part.loop.body.reasons if part.loop is not None else []
        return lines

    @property
    def refused(self) -> int:
        """How many parts should be native code, and are not."""
        inside = sum(part.loop.body.refused for part in self.parts if part.loop is not None)
        return inside + sum(bool(part.reasons) for part in self.parts)

    def text(self) -> str:
        """One line per cluster, and under it one for each refused instruction."""
        return "\n".join(part.text(number) for number, part in enumerate(self.parts)) + "\n"


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
    results = tuple(arrays_of(module.entry.root))
    levels = levels_of(module, refused, loops)
    work = _Division(module, levels.groups, levels.reads, frozenset(results), refused, loops)
    arguments = [(p, index) for p in module.entry.parameters for index, _ in p.shape.leaves()]
    return Clusters(tuple(work.parts()), tuple(arguments), results)


@dataclass(frozen=True)
class _Division:
    """A program, its instructions by level, the arrays that each reads; `refused`, `loops`: see `split`."""

    module: HloModule
    groups: Mapping[int, Sequence[HloInstruction]]
    reads: Mapping[HloInstruction, Sequence[Position]]
    results: Set[Position]
    refused: Mapping[HloInstruction, str]
    loops: Mapping[HloInstruction, LoopClusters]

    def parts(self) -> Iterator[Cluster]:
        for level, members in sorted(self.groups.items()):
            kind = level % KINDS
            if kind == LOOP:
                yield from (self._cluster([loop], native=False, loop=self.loops[loop]) for loop in members)
                continue
            part = self._cluster(members, native=kind in (NATIVE, BESIDE))
            if part.outputs or part.has_effect:
                yield part

    def _cluster(
        self, members: Sequence[HloInstruction], *, native: bool, loop: LoopClusters | None = None
    ) -> Cluster:
        reads, inside = self.reads, set(members)
        given = [at for m in members for at in reads[m]]
        outputs = [(m, index) for m in members for index, _ in m.shape.leaves()]
        inputs = [
            at for at in given if at[0] not in inside and (at[0] in reads or at[0].opcode == "parameter")
        ]
        inputs = list(dict.fromkeys(inputs))
        part = _Part(self.module, inputs)
        # A loop takes and gives its whole state, read or not; another part gives only arrays with readers
        # elsewhere.
        if loop is None:
            elsewhere = {at for i, positions in reads.items() if i not in inside for at in positions}
            outputs = [at for at in outputs if at in elsewhere or at in self.results]
        else:
            inputs = arrays_of(members[0].operands[0])
        program = part.program(members, outputs)
        reasons = {m.name: self.refused[m] for m in members if self.refused.get(m)}
        last = self._last_reads(inputs, members)
        return Cluster(native, tuple(members), tuple(inputs), tuple(outputs), last, program, reasons, loop)

    def _last_reads(self, inputs: Sequence[Position], members: Sequence[HloInstruction]) -> tuple[int, ...]:
        """The inputs of a cluster all of whose other readers are needed before it.

        Without such a dependence XLA may order a reader after the cluster, for which it would copy the array.
        """
        reads, groups = self.reads, self.groups
        # A native part runs as a whole: a reader of one of its results needs all of it. XLA's instructions
        # are separate, as it orders them itself.
        together = {i: group for level, group in groups.items() if level % KINDS <= BESIDE for i in group}
        before = set(members)
        todo = [producer for producer, _ in inputs]
        while todo:
            instruction = todo.pop()
            if instruction not in before:
                for needed in together.get(instruction, (instruction,)):
                    before.add(needed)
                    todo += [producer for producer, _ in reads.get(needed, ())]
        # `before` now has all that the part depends on, its own members included.
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
        for number, (producer, index) in enumerate(inputs):
            # between clusters arrays are row-major, however a library's call makes them
            shape = producer.subshape(index).with_default_layout()
            parameter = HloInstruction("parameter", shape, (), {"parameter_number": number})
            self.given[producer, index] = self.body.add(parameter)

    def program(self, members: Sequence[HloInstruction], outputs: Sequence[Position]) -> HloModule:
        for member in members:
            operands = [self._value(operand, ()) for operand in member.operands]
            self.copies[member] = self.body.add(self.twins[member.uid].clone(operands))
        results = [self._array(position) for position in outputs]
        # One tuple even of one array, so that all parts are called alike.
        shape = tuple_of([r.shape for r in results])
        self.body.set_root(self.body.add(HloInstruction("tuple", shape, results)))
        self.module.set_entry(self.body)
        self.module.remove_unreached()
        return self.module

    def _value(self, original: HloInstruction, index: ShapeIndex) -> HloInstruction:
        shape = original.subshape(index)
        if not shape.is_tuple:
            return self._array(made_at(original, index))
        parts = [self._value(original, (*index, k)) for k in range(len(shape.elements))]
        return self.body.add(HloInstruction("tuple", shape, parts))

    def _array(self, position: Position) -> HloInstruction:
        if position in self.given:
            return self.given[position]
        value, index = position
        # Neither a member nor an input: a value on no level, which this part computes again.
        if value not in self.copies:
            operands = [self._value(operand, ()) for operand in value.operands]
            self.copies[value] = self.body.add(self.twins[value.uid].clone(operands))
        array = self.copies[value]
        for number in index:
            shape = array.shape.subshape((number,))
            array = self.body.add(HloInstruction("get-tuple-element", shape, [array], {"index": number}))
        return array

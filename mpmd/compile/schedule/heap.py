"""The simulated heap: the bytes that an order of instructions needs, before buffers are assigned.

Values are allocated where they are defined and freed after their last reader.  Parameters, constants and
the program's results have memory of their own and are not counted.  The needs of a loop's body or a branch
are added where it runs.  A loop's state is outside of its body, and a donated parameter exists already: a
value computed in its place costs nothing after its last reader, and a copy otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mpmd.compile.analysis.dataflow import FORWARDING, Dataflow, HloValue
from mpmd.compile.analysis.liveness import overwritten_pairs
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule

_SPREADING = {
    "broadcast", "concatenate", "convolution", "custom-call", "dot", "dynamic-slice", "fft", "gather", "iota",
    "pad", "reduce", "reduce-window", "reverse", "rng-bit-generator", "scatter", "select-and-scatter",
    "slice", "sort", "transpose",
}  # fmt: skip
"""Opcodes that read an operand at other positions than those they write."""


@dataclass(slots=True)
class HeapEffect:
    """Effect of one instruction on the heap.

    Attributes:
        defines: values that need memory.
        reads: values of the same computation that it reads, each once.
        over: a value that it defines → operands whose memory it may take if it is their last reader.
        callees: computations that run inside of it.
    """

    defines: list[HloValue] = field(default_factory=list)
    reads: list[HloValue] = field(default_factory=list)
    over: dict[HloValue, list[HloValue]] = field(default_factory=dict)
    callees: tuple[HloComputation, ...] = ()


@dataclass(frozen=True, slots=True)
class Simulation:
    """The needs of an order.

    Attributes:
        profile: bytes in use while each instruction runs.
        copied: bytes of states that are not updated in place.
    """

    profile: list[int]
    copied: int

    @property
    def peak(self) -> int:
        """The maximum of bytes in use at once."""
        return max(self.profile, default=0)

    @property
    def score(self) -> tuple[int, int, int]:
        """Smaller is better: bytes held and copied, then held alone, then how long."""
        return self.peak + self.copied, self.peak, self.profile.count(self.peak)


class Heap:
    """The heap of a module, for any order of each of its computations.

    Attributes:
        traffic: effects of the instructions that run as part of the program.
        sizes: bytes of each counted value.
        readers: per value the instructions that read it.
        kept: per computation its results, which are freed by none of its instructions.
        states: a result of a loop's body → the state whose place it takes; likewise results of the program →
            donated parameters.
        inside: per computation its peak, once it is known; see `settle`.
    """

    def __init__(self, module: HloModule) -> None:
        self.dataflow = Dataflow(module)
        self.traffic: dict[HloInstruction, HeapEffect] = {}
        self.sizes: dict[HloValue, int] = {}
        self.readers: dict[HloValue, list[HloInstruction]] = {}
        self.kept: dict[HloComputation, set[HloValue]] = {}
        self.states: dict[HloValue, HloValue] = {}
        self.inside: dict[HloComputation, int] = {}
        self.computations = self.dataflow.graph.sequential()
        for computation in self.computations:
            self._measure(computation)

    def _measure(self, computation: HloComputation) -> None:
        root, at = computation.root, self.dataflow.value_at
        self.kept[computation] = {at(root, index) for index, _ in root.shape.leaves()}
        # Results of the program are written to memory of the caller, so the arena does not hold them.
        free = set(self.kept[computation]) if computation.is_entry else set()
        for replacement, state in self._replaced(computation):
            if replacement is not state and replacement.instruction.parent is computation:
                self.states.setdefault(replacement, state)
                # The state is counted by the caller; here only whether its place is free matters.
                self.sizes.setdefault(state, 0)
                free.discard(replacement)
        for instruction in computation:
            if instruction.opcode not in ("parameter", "constant"):
                for value in self.dataflow.defined_by(instruction):
                    self.sizes[value] = 0 if value in free else value.byte_size
        for instruction in computation:
            traffic = self.traffic[instruction] = HeapEffect()
            if instruction.opcode not in ("parameter", "constant"):
                traffic.defines = [v for v in self.dataflow.defined_by(instruction) if v in self.sizes]
            if instruction.opcode in ("while", "conditional", "call"):
                traffic.callees = tuple(dict.fromkeys(instruction.called))
            if instruction.opcode in FORWARDING and instruction.opcode != "call":
                continue
            read = [
                (number, index, at(operand, index))
                for number, operand in enumerate(instruction.operands)
                for index, _ in operand.shape.leaves()
            ]
            traffic.reads = list(dict.fromkeys(v for _, _, v in read if v in self.sizes))
            for value in traffic.reads:
                self.readers.setdefault(value, []).append(instruction)
            for value in traffic.defines:
                traffic.over[value] = [
                    source
                    for number, index, source in read
                    if source in self.sizes
                    and source.byte_size == value.byte_size
                    and may_take(instruction, number, index, value)
                ]

    def _replaced(self, computation: HloComputation) -> list[tuple[HloValue, HloValue]]:
        """Results of a computation, with the values in their place before."""
        root, at = computation.root, self.dataflow.value_at
        if computation.is_entry:
            module = self.dataflow.module
            return [
                (at(root, a.output_index), at(module.entry.parameters[a.parameter], a.parameter_index))
                for a in module.input_output_alias
            ]
        if any(c.opcode == "while" and c.while_body is computation for c in computation.callers):
            states = [(at(root, i), at(computation.parameters[0], i)) for i, _ in root.shape.leaves()]
            return [(value, state) for value, state in states if state.is_phi]
        return []

    def settle(self, computation: HloComputation, order: Sequence[HloInstruction]) -> None:
        """Record an order as the one of a computation, for its callers."""
        self.inside[computation] = self.simulate(order).peak

    def simulate(self, order: Sequence[HloInstruction]) -> Simulation:
        """The needs of an order of one computation, callees included."""
        # One pass: bytes in use, and how many readers each value still has.
        left = self.readers_left(order)
        in_use, copied, needs = 0, 0, []
        # values outside: states, and results in their place
        in_state = {self.states[v] for i in order for v in self.traffic[i].defines if v in self.states}
        for instruction in order:
            traffic = self.traffic[instruction]
            dying: dict[HloValue, None] = {}
            for value in traffic.reads:
                if value in left:
                    left[value] -= 1
                    if not left[value]:
                        dying[value] = None
            for value in traffic.defines:
                in_use += self.sizes[value]
                state = self.states.get(value)
                takes = [s for s in traffic.over[value] if s in dying]
                # The state's place is free if its last reader ran before, or is this instruction and may be
                # overwritten.  Then the value costs nothing; otherwise it needs memory now, and a copy into
                # the state at the end.
                if state is not None and (state in takes or (left[state] <= 0 and state not in dying)):
                    in_use -= self.sizes[value]
                    in_state.add(value)
                    continue
                copied += self.sizes[value] if state is not None else 0
                # It is written over a dying operand, whose bytes are not freed a second time below.
                if takes and self.sizes[takes[0]] and takes[0] not in in_state:
                    in_use -= self.sizes[takes[0]]
                    del dying[takes[0]]
            # A branch computes the result itself: it does not add to the branch's needs.
            written = (
                sum(self.sizes[v] for v in traffic.defines) if instruction.opcode == "conditional" else 0
            )
            inside = max((self.inside.get(c, 0) for c in traffic.callees), default=0)
            needs.append(in_use + max(0, inside - written))
            gone = [*dying, *(v for v in traffic.defines if not left[v])]
            in_use -= sum(self.sizes[v] for v in gone if v not in in_state)
        return Simulation(needs, copied)

    def readers_left(self, order: Sequence[HloInstruction]) -> dict[HloValue, int]:
        """The number of readers of each value of a computation, its callers' included."""
        left = {v: len(self.readers.get(v, ())) for i in order for v in self.traffic[i].defines}
        if order:
            computation = order[0].parent
            for replacement, state in self.states.items():
                if replacement.instruction.parent is computation:
                    # Readers inside this computation only: a state is also read by the condition, and after
                    # the loop.
                    left[state] = sum(i.parent is computation for i in self.readers.get(state, ()))
            for value in self.kept[computation]:
                if value in left:
                    # Kept to the end: the caller reads it.
                    left[value] += 1
        return left


def peak_of(module: HloModule) -> int:
    """The maximum of bytes in use at once for the current order of instructions."""
    heap = Heap(module)
    for computation in heap.computations:
        heap.settle(computation, list(computation))
    return heap.inside[module.entry]


def may_take(instruction: HloInstruction, operand: int, index: tuple[int, ...], value: HloValue) -> bool:
    """Whether a result may be written over an operand, judged by opcodes.

    Coalescing later follows the kernels, which allow more; the order is chosen by this rule.
    """
    if instruction.opcode == "while":
        return index == value.index
    if (operand, index, value.index) in overwritten_pairs(instruction):
        return True
    if instruction.opcode in ("conditional", "call"):
        return False
    if instruction.opcode == "fusion":
        parameter = instruction.to_apply.parameters[operand]
        return not any(user.opcode in _SPREADING for user in _beyond_bitcasts(parameter.users))
    return instruction.opcode not in _SPREADING


def _beyond_bitcasts(users: Iterable[HloInstruction]) -> list[HloInstruction]:
    readers: list[HloInstruction] = []
    waiting = list(users)
    while waiting:
        user = waiting.pop()
        if user.opcode == "bitcast":
            waiting += list(user.users)
        else:
            readers.append(user)
    return readers

"""Which values a result may hold: each defined once, forwarded through tuples, calls and loops.

A value is one array (or token) that some instruction defines, at one position of its result.  Tuples
themselves are not values: they hold positions, not memory.  Where a loop or branch joins different values, a
phi is defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import Shape, ShapeIndex

Position = tuple[HloInstruction, ShapeIndex]
"""An array: an instruction, and the position in its result."""


@dataclass(frozen=True, slots=True)
class Use:
    """A value read: by which instruction, as which operand, at which position of it."""

    instruction: HloInstruction
    operand: int
    index: ShapeIndex


@dataclass(eq=False, slots=True)
class HloValue:
    """One value.

    Attributes:
        number: in order of definition.
        instruction: its definition.
        index: position in the result.
        is_phi: it joins different values.
        positions: all its positions, the defining position first.
        uses: reads that need its memory; tuples, get-tuple-elements and the like only forward it.
        live_out: it is part of the program's result.
    """

    number: int
    instruction: HloInstruction
    index: ShapeIndex
    is_phi: bool = False
    positions: list[Position] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    live_out: bool = False

    @property
    def shape(self) -> Shape:
        return self.instruction.shape.subshape(self.index)

    @property
    def byte_size(self) -> int:
        """Bytes of the array."""
        return self.shape.byte_size

    def __repr__(self) -> str:
        index = "{" + ",".join(map(str, self.index)) + "}"
        return f"{self.instruction.name}{index}{' phi' if self.is_phi else ''}"


FORWARDING = frozenset(
    [
        "tuple",
        "get-tuple-element",
        "bitcast",
        "opt-barrier",
        "domain",
        "add-dependency",
        "call",
    ]
)
"""Opcodes whose results hold their operands' values, or those of the computation they call."""


class Dataflow:
    """Values of all instructions that run as part of the program.

    Requires that each computation has one caller (see `CallGraph.is_flat`) for exact answers, and that no
    operation is asynchronous (`hlo-async-expander`); values that reach a computation from several callers are
    joined by a phi.
    """

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.graph = CallGraph(module)
        self._held: dict[Position, HloValue] = {}
        self._defined: dict[Position, HloValue] = {}
        self._solve()
        self.values: list[HloValue] = []
        self._collect()

    # -- questions ----------------------------------------------------------------------------------

    def value_at(self, instruction: HloInstruction, index: ShapeIndex = ()) -> HloValue:
        """The value at a position, which must not be a tuple."""
        return self._held[instruction, index]

    def defined_by(self, instruction: HloInstruction) -> list[HloValue]:
        values = (self._held[instruction, i] for i, _ in instruction.shape.leaves())
        return [v for v in values if v.instruction is instruction]

    # -- solution -----------------------------------------------------------------------------------

    def _solve(self) -> None:
        """Forward values until nothing changes: joins start without phi and get one when two values meet."""
        order = self.graph.sequential()
        changed = True
        while changed:
            changed = False
            for computation in reversed(order):
                for instruction in computation.post_order():
                    for index, _ in instruction.shape.leaves():
                        if self._update(instruction, index):
                            changed = True

        self._drop_idle_phis()
        self._one_phi_per_state()

    def _one_phi_per_state(self) -> None:
        """A loop's state is one value: before the condition, in the body, and after the loop."""
        same: dict[HloValue, HloValue] = {}
        for computation in self.graph.sequential():
            for loop in computation:
                if loop.opcode != "while":
                    continue
                for index, _ in loop.shape.leaves():
                    state = self._held[loop, index]
                    if not (state.is_phi and state.instruction is loop):
                        continue
                    for callee in loop.called:
                        inner = self._held[callee.parameters[0], index]
                        if inner.is_phi and inner.instruction is callee.parameters[0]:
                            same[inner] = state
        if same:
            self._held = {p: same.get(v, v) for p, v in self._held.items()}

    def _drop_idle_phis(self) -> None:
        """Undo joins of a value with itself, made while inputs were not yet known."""
        changed = True
        while changed:
            changed = False
            for phi in [v for v in dict.fromkeys(self._held.values()) if v.is_phi]:
                met = dict.fromkeys(v for v in self._inputs(phi.instruction, phi.index) if v is not phi)
                if len(met) == 1:
                    (only,) = met
                    self._held = {
                        p: only if v is phi else v for p, v in self._held.items() if only is not None
                    }
                    changed = True

    def _update(self, instruction: HloInstruction, index: ShapeIndex) -> bool:
        position = (instruction, index)
        known = self._held.get(position)
        if known is not None and known.is_phi and known.instruction is instruction:
            return False
        inputs = list(dict.fromkeys(self._inputs(instruction, index)))
        if inputs == [None]:
            value: HloValue | None = self._own(position, False)
        else:
            met = [v for v in inputs if v is not None]
            if not met:
                return False
            value = met[0] if len(met) == 1 else self._own(position, True)
        if value is known:
            return False
        self._held[position] = value  # type: ignore[assignment]
        return True

    def _own(self, position: Position, phi: bool) -> HloValue:
        value = self._defined.get(position)
        if value is None or value.is_phi != phi:
            value = self._defined[position] = HloValue(-1, position[0], position[1], phi)
        return value

    def _inputs(self, instruction: HloInstruction, index: ShapeIndex) -> Iterator[HloValue | None]:
        """Values that a position may hold; `None` alone: it defines its own.  Unknown ones are left out."""
        opcode = instruction.opcode
        if opcode == "parameter":
            yield from self._parameter(instruction, index)
            return
        if opcode == "while":
            sources = [(instruction.operands[0], index), (instruction.while_body.root, index)]
        elif opcode == "conditional":
            sources = [(branch.root, index) for branch in instruction.called]
        else:
            forward = _FORWARD.get(opcode)
            source = forward(instruction, index) if forward is not None else None
            if source is None:
                yield None
                return
            sources = [source]
        for position in sources:
            value = self._held.get(position)
            if value is not None:
                yield value

    def _parameter(self, instruction: HloInstruction, index: ShapeIndex) -> Iterator[HloValue | None]:
        computation = instruction.parent
        number = instruction.parameter_number
        callers = [c for c in computation.callers if c.parent in self.graph.contexts]
        if computation.is_entry or not callers:
            yield None
            return
        for caller in callers:
            for position in _arguments(caller, computation, number, index):
                value = self._held.get(position)
                if value is not None:
                    yield value

    # -- positions and uses -------------------------------------------------------------------------

    def _collect(self) -> None:
        for computation in self.graph.sequential():
            for instruction in computation.post_order():
                for index, _ in instruction.shape.leaves():
                    value = self._held.get((instruction, index))
                    if value is None:
                        continue
                    if value.number < 0:
                        value.number = len(self.values)
                        self.values.append(value)
                    value.positions.append((instruction, index))
        for value in self.values:
            value.positions.sort(key=lambda p: p != (value.instruction, value.index))
        for computation in self.graph.sequential():
            for instruction in computation:
                self._add_uses(instruction)
        root = self.module.entry.root
        for index, _ in root.shape.leaves():
            self._held[root, index].live_out = True

    def _add_uses(self, instruction: HloInstruction) -> None:
        for number, operand in enumerate(instruction.operands):
            for index, _ in operand.shape.leaves():
                if _reads(instruction, number):
                    self._held[operand, index].uses.append(Use(instruction, number, index))


def _reads(instruction: HloInstruction, operand: int) -> bool:
    """Whether an instruction needs the memory of an operand, rather than forwarding it."""
    if instruction.opcode == "conditional":
        return operand == 0
    return instruction.opcode not in FORWARDING and instruction.opcode != "while"


def _arguments(
    caller: HloInstruction, callee: HloComputation, number: int, index: ShapeIndex
) -> list[Position]:
    if caller.opcode == "while":
        return [(caller.operands[0], index), (caller.while_body.root, index)]
    if caller.opcode == "conditional":
        return [(caller.operands[1 + i], index) for i, c in enumerate(caller.called) if c is callee]
    return [(caller.operands[number], index)]


Forward = Callable[[HloInstruction, ShapeIndex], "Position | None"]


def _same_place(instruction: HloInstruction, index: ShapeIndex) -> Position | None:
    return instruction.operands[0], index


def _from_tuple(instruction: HloInstruction, index: ShapeIndex) -> Position | None:
    return instruction.operands[index[0]], index[1:]


def _from_element(instruction: HloInstruction, index: ShapeIndex) -> Position | None:
    return instruction.operands[0], (instruction.tuple_index, *index)


def _from_callee(instruction: HloInstruction, index: ShapeIndex) -> Position | None:
    return instruction.to_apply.root, index


_FORWARD: dict[str, Forward] = {
    "add-dependency": _same_place,
    "bitcast": _same_place,
    "call": _from_callee,
    "domain": _same_place,
    "get-tuple-element": _from_element,
    "opt-barrier": _same_place,
    "tuple": _from_tuple,
}

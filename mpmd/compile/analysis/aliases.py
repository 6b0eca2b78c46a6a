"""Which values must share memory: buffers, as sets of values.

Union-find over the values of `Dataflow`: phis with the values they join, results of in-place operations
with their operands, results of the program with the parameters they alias.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.analysis.dataflow import Dataflow, HloValue
from mpmd.compile.analysis.in_place import in_place_pairs
from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import ShapeIndex


@dataclass(eq=False, slots=True)
class HloBuffer:
    """Values that lie in the same memory.

    Attributes:
        number: in order of the first value.
        values: by number.
        byte_size: of the largest value.
        live_out: some value is part of the program's result.
        parameters: (number, position) of the entry's parameters whose memory it is.
    """

    number: int
    values: list[HloValue]
    byte_size: int
    live_out: bool
    parameters: tuple[tuple[int, ShapeIndex], ...]

    def __repr__(self) -> str:
        return f"buffer {self.number}: {self.byte_size} bytes, " + ", ".join(map(repr, self.values))


class Aliases:
    """Buffers of a program.

    Attributes:
        dataflow: the values.
        buffers: all buffers, by number.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self._parent: dict[HloValue, HloValue] = {v: v for v in dataflow.values}
        for value in dataflow.values:
            if value.is_phi:
                self._join_phi(value)
        for computation in dataflow.graph.sequential():
            for instruction in computation:
                self._join_in_place(instruction)
        self._join_border()
        self.buffers = self._collect()
        self._of = {v: b for b in self.buffers for v in b.values}

    def buffer_of(self, value: HloValue) -> HloBuffer:
        """The buffer that holds a value."""
        return self._of[value]

    def buffer_at(self, instruction: HloInstruction, index: ShapeIndex = ()) -> HloBuffer:
        """The buffer at a position of a result."""
        return self._of[self.dataflow.value_at(instruction, index)]

    # -- union-find ---------------------------------------------------------------------------------

    def _find(self, value: HloValue) -> HloValue:
        root = value
        while self._parent[root] is not root:
            root = self._parent[root]
        while self._parent[value] is not root:
            self._parent[value], value = root, self._parent[value]
        return root

    def _union(self, a: HloValue, b: HloValue) -> None:
        first, second = sorted((self._find(a), self._find(b)), key=lambda v: v.number)
        self._parent[second] = first

    def _join_phi(self, phi: HloValue) -> None:
        for instruction, index in phi.positions:
            if instruction.opcode == "parameter":
                for caller in instruction.parent.callers:
                    self._join_caller(phi, caller, instruction, index)
            elif instruction.opcode == "while":
                self._union(phi, self.dataflow.value_at(instruction.operands[0], index))
                self._union(phi, self.dataflow.value_at(instruction.while_body.root, index))
            elif instruction.opcode == "conditional":
                for branch in instruction.called:
                    self._union(phi, self.dataflow.value_at(branch.root, index))

    def _join_caller(
        self, phi: HloValue, caller: HloInstruction, parameter: HloInstruction, index: ShapeIndex
    ) -> None:
        if caller.opcode == "while":
            self._union(phi, self.dataflow.value_at(caller.operands[0], index))
            self._union(phi, self.dataflow.value_at(caller.while_body.root, index))
        elif caller.opcode == "call":
            self._union(phi, self.dataflow.value_at(caller.operands[parameter.parameter_number], index))

    def _join_in_place(self, instruction: HloInstruction) -> None:
        for operand, inner, outer in in_place_pairs(instruction):
            self._union(
                self.dataflow.value_at(instruction.operands[operand], inner),
                self.dataflow.value_at(instruction, outer),
            )

    def _join_border(self) -> None:
        module = self.dataflow.module
        parameters = module.entry.parameters
        for alias in module.input_output_alias:
            self._union(
                self.dataflow.value_at(module.entry.root, alias.output_index),
                self.dataflow.value_at(parameters[alias.parameter], alias.parameter_index),
            )

    def _collect(self) -> list[HloBuffer]:
        groups: dict[HloValue, list[HloValue]] = {}
        for value in self.dataflow.values:
            groups.setdefault(self._find(value), []).append(value)
        entry = self.dataflow.module.entry
        out = []
        for number, values in enumerate(groups.values()):
            owned: list[tuple[int, Ints]] = [
                (v.instruction.parameter_number, v.index)
                for v in values
                if v.instruction.opcode == "parameter" and v.instruction.computation is entry
            ]
            size = max(v.byte_size for v in values)
            out.append(HloBuffer(number, values, size, any(v.live_out for v in values), tuple(owned)))
        return out

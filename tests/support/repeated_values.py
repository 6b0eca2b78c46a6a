"""Which values a program computes more than once, whatever groups they stand in."""

from __future__ import annotations

import collections
from collections.abc import Hashable

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.kernels.planner.elements import MOVEMENT

_NOT_COMPUTED = MOVEMENT | {"parameter", "constant", "tuple", "get-tuple-element", "fusion"}


def repeated_values(module: HloModule) -> dict[str, list[HloInstruction]]:
    """Opcode → instructions of the entry and of its fusions that compute what an earlier one computes."""
    numbering = _Numbering()
    numbering.walk(module.entry, {})
    found: dict[str, list[HloInstruction]] = {}
    for instructions in numbering.computed.values():
        for instruction in instructions[1:]:
            found.setdefault(instruction.opcode, []).append(instruction)
    return found


class _Numbering:
    """Equal numbers for equal values: of the same operation, on operands with the same numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.computed: dict[int, list[HloInstruction]] = collections.defaultdict(list)

    def walk(self, computation: HloComputation, given: dict[HloInstruction, object]) -> object:
        """Numbers the instructions of a computation; the number of its root."""
        number: dict[HloInstruction, object] = dict(given)
        for i in computation.post_order():
            if i not in number:
                number[i] = self._number(i, number)
        return number[computation.root]

    def _number(self, i: HloInstruction, number: dict[HloInstruction, object]) -> object:
        operands = tuple(number[o] for o in i.operands)
        if i.opcode == "tuple":
            return operands
        if i.opcode == "get-tuple-element" and isinstance(operands[0], tuple):
            return operands[0][i.attributes["index"]]
        if i.opcode == "fusion":
            return self.walk(i.to_apply, dict(zip(i.to_apply.parameters, operands, strict=True)))
        literal = i.literal.tobytes() if i.opcode == "constant" and not isinstance(i.literal, tuple) else None
        own = i if i.opcode == "parameter" or i.has_side_effect else None
        attributes = repr(sorted((k, v) for k, v in i.attributes.items() if k != "literal"))
        bodies = tuple(tuple(x.opcode for x in c.post_order()) for c in i.called)
        key = (i.opcode, str(i.shape), attributes, operands, literal, own, bodies)
        found = self.numbers.setdefault(key, len(self.numbers))
        if i.opcode not in _NOT_COMPUTED:
            self.computed[found].append(i)
        return found

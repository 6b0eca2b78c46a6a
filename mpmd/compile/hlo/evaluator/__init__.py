"""The evaluator: values of instructions that are known at compile time, in NumPy, slow and simple.

It knows the opcodes that are left when constants are folded, and those that constants come from: elementwise
operations, conversions, movement.  One file has the rules of each family; `Evaluator` runs instruction after
instruction on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import elementwise, movement, values
from mpmd.compile.hlo.evaluator.values import Rule, Value, check_value
from mpmd.compile.hlo.instruction import HloInstruction

__all__ = ["Evaluator", "is_evaluable"]


RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **values.RULES,
    **movement.RULES,
}
"""Evaluation of each opcode."""


def is_evaluable(instruction: HloInstruction) -> bool:
    """Whether there is a rule for an instruction."""
    if instruction.opcode == "bitcast-convert":
        return instruction.shape.info.bits == instruction.operands[0].shape.info.bits
    return instruction.opcode in RULES


class Evaluator:
    """One evaluation of computations.

    Attributes:
        replicas: number of replicas.
        partitions: number of partitions; devices are numbered replica by replica.
        device: the device whose value is being computed.
        rules: evaluation of each opcode.
    """

    rules: ClassVar[Mapping[str, Rule]] = RULES

    def __init__(self, replicas: int = 1, partitions: int = 1, device: int = 0) -> None:
        self.replicas = replicas
        self.partitions = partitions
        self.device = device
        self._plans: dict[HloComputation, list[tuple[HloInstruction, list[HloInstruction]]]] = {}

    def run(self, computation: HloComputation, arguments: Sequence[Value], checked: bool = True) -> Value:
        """The result of a computation.

        Args:
            computation: the computation to run, of instructions that have rules.
            arguments: the parameters' values.
            checked: compare each value with the shape its instruction states.
        """
        values: dict[HloInstruction, Value] = {}
        for instruction, dead in self.plan(computation):
            if instruction.opcode == "parameter":
                value = arguments[instruction.parameter_number]
            else:
                operands = [values[o] for o in instruction.operands]
                value = self.rules[instruction.opcode](instruction, operands, self)
                value = np.asarray(value) if isinstance(value, np.generic) else value
            if checked:
                check_value(value, instruction.shape, f"the value of {instruction.opcode} {instruction.name}")
            values[instruction] = value
            for name in dead:
                del values[name]
        return values[computation.root]

    def plan(self, computation: HloComputation) -> list[tuple[HloInstruction, list[HloInstruction]]]:
        """The order of evaluation, and after each instruction the values that are dead."""
        plan = self._plans.get(computation)
        if plan is None:
            order = computation.post_order()
            last: dict[HloInstruction, HloInstruction] = {}
            for instruction in order:
                for operand in instruction.operands:
                    last[operand] = instruction
            dead: dict[HloInstruction, list[HloInstruction]] = {}
            for value, user in last.items():
                if value is not computation.root:
                    dead.setdefault(user, []).append(value)
            plan = self._plans[computation] = [(i, dead.get(i, [])) for i in order]
        return plan

"""The evaluator of the library, and what opcodes mean that it never computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import Evaluator
from mpmd.compile.hlo.evaluator.values import Value, check_value
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError
from tests.support.hlo_meaning import control, custom_calls, random
from tests.support.hlo_meaning.collectives import GROUP_RULES, GroupRule, Rows


class Meaning(Evaluator):
    """One evaluation of any program on one or several devices.

    Attributes:
        joint_rules: what opcodes mean on all devices together.
        random_state: the program's counter for rng-get-and-update-state.
    """

    rules = {**Evaluator.rules, **control.RULES, **random.RULES, **custom_calls.RULES}
    joint_rules: Mapping[str, GroupRule] = {**control.CONTROL_RULES, **GROUP_RULES}

    def __init__(self, replicas: int = 1, partitions: int = 1) -> None:
        super().__init__(replicas, partitions)
        self.random_state = 1
        self._ticks = 0

    def tick(self) -> int:
        """How often this was asked before: separates the runs of one instruction."""
        self._ticks += 1
        return self._ticks - 1

    def run(self, computation: HloComputation, arguments: Sequence[Value], checked: bool = True) -> Value:
        """The result of a computation on the present device."""
        return self.run_together(computation, [list(arguments)], [self.device], checked)[0]

    def run_together(
        self, computation: HloComputation, arguments: Rows, devices: list[int], checked: bool = True
    ) -> list[Value]:
        """Results of a computation on each device.

        Args:
            computation: what to run.
            arguments: for each device, the parameters' values.
            devices: their numbers.
            checked: compare each value with the shape its instruction states.
        """
        values: dict[HloInstruction, list[Value]] = {}
        for instruction, dead in self.plan(computation):
            rows = [[values[o][k] for o in instruction.operands] for k in range(len(devices))]
            results = self._step(instruction, rows, arguments, devices)
            if checked:
                for result in results:
                    check_value(
                        result, instruction.shape, f"the value of {instruction.opcode} {instruction.name}"
                    )
            values[instruction] = results
            for name in dead:
                del values[name]
        return values[computation.root]

    def _step(
        self, instruction: HloInstruction, rows: Rows, arguments: Rows, devices: list[int]
    ) -> list[Value]:
        opcode = instruction.opcode
        if opcode == "parameter":
            return [row[instruction.parameter_number] for row in arguments]
        joint = self.joint_rules.get(opcode)
        if joint is not None:
            return joint(instruction, rows, devices, self)
        rule = self.rules.get(opcode)
        if rule is None:
            raise HloError(f"{opcode} {instruction.name} cannot be evaluated")
        out = []
        for row, device in zip(rows, devices):
            self.device = device
            out.append(rule(instruction, row, self))
        return [np.asarray(v) if isinstance(v, np.generic) else v for v in out]

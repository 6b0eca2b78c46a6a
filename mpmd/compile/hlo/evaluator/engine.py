"""The evaluator's loop: instruction after instruction, all devices in step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import (
    control,
    conversion,
    elementwise,
    indexed,
    movement,
    products,
    reductions,
    sorting,
)
from mpmd.compile.hlo.evaluator.control import CONTROL_RULES
from mpmd.compile.hlo.evaluator.reducers import is_pointwise
from mpmd.compile.hlo.evaluator.values import Array, GroupRule, Rows, Rule, Value, check_value
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **conversion.RULES,
    **movement.RULES,
    **products.RULES,
    **indexed.RULES,
    **reductions.RULES,
    **sorting.RULES,
    **control.RULES,
}
"""What each opcode means on one device."""


class Evaluator:
    """One evaluation of a program on one or several devices.

    Attributes:
        replicas: number of replicas.
        partitions: number of partitions; devices are numbered replica by replica.
        device: the device whose value is being computed.
        rules: what each opcode means on one device.
        joint_rules: what the other opcodes mean, on all devices together.
    """

    rules: ClassVar[Mapping[str, Rule]] = RULES
    joint_rules: ClassVar[Mapping[str, GroupRule]] = CONTROL_RULES

    def __init__(self, replicas: int = 1, partitions: int = 1) -> None:
        self.replicas = replicas
        self.partitions = partitions
        self.device = 0
        self._plans: dict[HloComputation, list[tuple[HloInstruction, list[HloInstruction]]]] = {}
        self._pointwise: dict[HloComputation, bool] = {}

    def run(
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
        for instruction, dead in self._plan(computation):
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
            raise HloError(f"{opcode} {instruction.name} cannot be evaluated when a program is compiled")
        out = []
        for row, device in zip(rows, devices):
            self.device = device
            out.append(rule(instruction, row, self))
        return [np.asarray(v) if isinstance(v, np.generic) else v for v in out]

    def apply(self, computation: HloComputation, arguments: Sequence[Array], dims: tuple[int, ...]) -> Any:
        """A computation on scalars, for each element of arrays of these dims: an array or tuple of arrays."""
        pointwise = self._pointwise.get(computation)
        if pointwise is None:
            pointwise = self._pointwise[computation] = is_pointwise(computation)
        if pointwise:
            made = self.run(computation, [list(arguments)], [self.device], checked=False)[0]
            return _spread(made, dims)
        spread = [np.broadcast_to(a, dims) for a in arguments]
        results = [
            self.run(computation, [[np.asarray(a[index]) for a in spread]], [self.device])[0]
            for index in np.ndindex(*dims)
        ]
        shape = computation.root.shape
        if shape.is_tuple:
            return tuple(
                np.array([r[i] for r in results], s.numpy_dtype).reshape(dims)
                for i, s in enumerate(shape.elements)
            )
        return np.array(results, shape.numpy_dtype).reshape(dims)

    def _plan(self, computation: HloComputation) -> list[tuple[HloInstruction, list[HloInstruction]]]:
        """The order of evaluation, and after each instruction the values nobody needs any more."""
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


def _spread(value: Value, dims: tuple[int, ...]) -> Value:
    if isinstance(value, tuple):
        return tuple(_spread(v, dims) for v in value)
    return np.broadcast_to(np.asarray(value), dims)

"""The evaluator of the library, and what opcodes mean that it never computes but tests need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import Evaluator
from mpmd.compile.hlo.evaluator.values import Array, Value, check_value
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError
from tests.support.hlo_meaning import (
    control,
    custom_calls,
    indexed,
    memory,
    pointwise,
    products,
    random,
    reductions,
    rounding,
    sorting,
)
from tests.support.hlo_meaning.collectives import GROUP_RULES, GroupRule, Rows


class Meaning(Evaluator):
    """One evaluation of any program on one or several devices.

    Attributes:
        joint_rules: what opcodes mean on all devices together.
    """

    rules = {
        **Evaluator.rules,
        **control.RULES,
        **custom_calls.RULES,
        **indexed.RULES,
        **memory.RULES,
        **pointwise.RULES,
        **products.RULES,
        **random.RULES,
        **reductions.RULES,
        **rounding.RULES,
        **sorting.RULES,
    }
    joint_rules: Mapping[str, GroupRule] = {**control.CONTROL_RULES, **GROUP_RULES}

    def __init__(self, replicas: int = 1, partitions: int = 1) -> None:
        super().__init__(replicas, partitions)
        self._pointwise: dict[HloComputation, bool] = {}

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

    def apply(self, computation: HloComputation, arguments: Sequence[Array], dims: tuple[int, ...]) -> Any:
        """A computation on scalars, for each element of arrays of these dims: an array or tuple of arrays."""
        at_once = self._pointwise.get(computation)
        if at_once is None:
            at_once = self._pointwise[computation] = pointwise.is_pointwise(computation)
        if at_once:
            made = self.run(computation, arguments, checked=False)
            return pointwise.spread(made, dims)
        rows = [np.broadcast_to(a, dims) for a in arguments]
        results = [self.run(computation, [np.asarray(a[index]) for a in rows]) for index in np.ndindex(*dims)]
        shape = computation.root.shape
        if shape.is_tuple:
            return tuple(
                np.array([r[i] for r in results], s.numpy_dtype).reshape(dims)
                for i, s in enumerate(shape.elements)
            )
        return np.array(results, shape.numpy_dtype).reshape(dims)

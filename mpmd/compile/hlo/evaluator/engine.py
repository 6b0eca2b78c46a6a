"""The evaluator's loop: instruction after instruction, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import (
    conversion,
    elementwise,
    indexed,
    movement,
    products,
    reductions,
    sorting,
)
from mpmd.compile.hlo.evaluator.reducers import is_pointwise
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, check_value
from mpmd.compile.hlo.instruction import HloInstruction

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **conversion.RULES,
    **movement.RULES,
    **products.RULES,
    **indexed.RULES,
    **reductions.RULES,
    **sorting.RULES,
}
"""What opcodes mean."""


def is_evaluable(instruction: HloInstruction) -> bool:
    """Whether there is a rule for an instruction, and for those of the computations that it calls."""
    known = instruction.opcode in RULES or instruction.opcode == "parameter"
    return known and all(is_evaluable(inner) for called in instruction.called for inner in called)


class Evaluator:
    """One evaluation of computations.

    Attributes:
        replicas: number of replicas.
        partitions: number of partitions; devices are numbered replica by replica.
        device: the device whose value is being computed.
        rules: what each opcode means.
    """

    rules: ClassVar[Mapping[str, Rule]] = RULES

    def __init__(self, replicas: int = 1, partitions: int = 1, device: int = 0) -> None:
        self.replicas = replicas
        self.partitions = partitions
        self.device = device
        self._plans: dict[HloComputation, list[tuple[HloInstruction, list[HloInstruction]]]] = {}
        self._pointwise: dict[HloComputation, bool] = {}

    def run(self, computation: HloComputation, arguments: Sequence[Value], checked: bool = True) -> Value:
        """The result of a computation.

        Args:
            computation: what to run, of instructions that have rules.
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

    def apply(self, computation: HloComputation, arguments: Sequence[Array], dims: tuple[int, ...]) -> Any:
        """A computation on scalars, for each element of arrays of these dims: an array or tuple of arrays."""
        pointwise = self._pointwise.get(computation)
        if pointwise is None:
            pointwise = self._pointwise[computation] = is_pointwise(computation)
        if pointwise:
            made = self.run(computation, arguments, checked=False)
            return _spread(made, dims)
        spread = [np.broadcast_to(a, dims) for a in arguments]
        results = [
            self.run(computation, [np.asarray(a[index]) for a in spread]) for index in np.ndindex(*dims)
        ]
        shape = computation.root.shape
        if shape.is_tuple:
            return tuple(
                np.array([r[i] for r in results], s.numpy_dtype).reshape(dims)
                for i, s in enumerate(shape.elements)
            )
        return np.array(results, shape.numpy_dtype).reshape(dims)

    def plan(self, computation: HloComputation) -> list[tuple[HloInstruction, list[HloInstruction]]]:
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

"""Kernels beside the meaning of what they compute: plans are evaluated without passes, memory and code."""

from __future__ import annotations

import jax
import numpy as np

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.evaluate_products import evaluate_product
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.planner import PlannedKernel, plan_instruction
from mpmd.compile.kernels.planner.dots import DotPlan
from mpmd.compile.kernels.planner.elements import elements_of
from mpmd.compile.kernels.planner.groups import GroupPlan, UpdatePlan
from tests.support import hlo_meaning
from tests.support.random_hlo.comparison import differences
from tests.support.random_hlo.draft import Case

_UNWRITTEN = 0xFF


def planned_differences(case: Case) -> str:
    """What the kernel of a program that is one fusion computes otherwise than the fusion; "" if nothing.

    Raises:
        NoPlan: no kernel computes it.
    """
    fusion = case.module.entry.root
    planned = plan_instruction("kernel", fusion)
    arrays = dict(zip(fusion.to_apply.parameters, case.arguments, strict=True))
    wanted = jax.tree.leaves(hlo_meaning.evaluate(case.module, case.arguments))
    root = fusion.to_apply.root
    results = root.operands if root.opcode == "tuple" else [root]
    computed = _computed(planned, arrays)
    return differences([computed[r] for r in results], wanted, case)


def _computed(
    planned: PlannedKernel, arrays: dict[HloInstruction, np.ndarray]
) -> dict[HloInstruction, np.ndarray]:
    """The results of a kernel, given the arrays of the fusion's parameters."""

    def memory(value: HloInstruction) -> np.ndarray:
        given = arrays.get(value, value.literal)
        return np.ascontiguousarray(given).reshape(-1).view(NUMPY_DTYPE[elements_of(value)[0]])

    if isinstance(planned, UpdatePlan):
        target = memory(planned.target).copy()
        evaluate(planned.plan, [*map(memory, planned.arrays), target])
        return {planned.result: target.reshape(planned.result.shape.dims)}
    assert isinstance(planned, GroupPlan | DotPlan)
    made = {}
    for value in planned.results:
        dtype, size = elements_of(value)
        made[value] = np.full(size * np.dtype(NUMPY_DTYPE[dtype]).itemsize, _UNWRITTEN, np.uint8).view(
            NUMPY_DTYPE[dtype]
        )
    operands = [*map(memory, planned.arrays), *made.values()]
    if isinstance(planned, GroupPlan):
        evaluate(planned.plan, operands)
    else:
        epilogue = planned.plan.epilogue
        count = len(operands) + (epilogue is not None)
        numbers = [k for k in range(count) if epilogue is None or k != planned.plan.sums]
        evaluate_product(
            planned.plan, *map(memory, planned.factors), dict(zip(numbers, operands, strict=True))
        )
    return {v: a.view(v.shape.numpy_dtype).reshape(v.shape.dims) for v, a in made.items()}

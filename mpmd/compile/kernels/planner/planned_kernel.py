"""Any instruction or fusion → the kernel that computes it."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planner.attention import PlannedAttention, plan_attention
from mpmd.compile.kernels.planner.collectives import COLLECTIVES, CollectivePlan, plan_collective
from mpmd.compile.kernels.planner.dots import DotPlan, is_product, plan_dot
from mpmd.compile.kernels.planner.elements import MOVEMENT, NoPlan
from mpmd.compile.kernels.planner.groups import UPDATES, GroupPlan, UpdatePlan, plan_group, plan_update
from mpmd.compile.kernels.planner.plan_cache import cached_plan
from mpmd.compile.kernels.planner.sorting import plan_sort, plan_sort_prefix

_INSTEAD = {
    "convolution": "its windows overlap, and XLA has a library for it",
    "cholesky": "XLA has a library for it",
    "fft": "XLA has a library for it",
    "map": "its computation has loops or branches; write it with whole arrays",
    "ragged-dot": "write a product for each group of rows, as jax.lax.ragged_dot does on a CPU",
    "rng": "its numbers come from a hidden state; use rng-bit-generator, as jax.random does",
    "rng-get-and-update-state": "it reads a hidden state; give rng-bit-generator a state, as jax.random does",
    "scaled-dot": "convert both operands, multiply them by their scales, and use dot",
    "scan": "write it as a while, as jax.lax.scan does",
    "triangular-solve": "XLA has a library for it",
    "set-dimension-size": "a number says at run time how many elements there are; keep the bound, and mask",
}
"""Opcodes that no kernel computes → why, and what to do."""

PlannedKernel = GroupPlan | DotPlan | UpdatePlan | CollectivePlan | PlannedAttention


@cached_plan
def plan_members(
    name: str, group: Sequence[HloInstruction], results: Sequence[HloInstruction]
) -> PlannedKernel:
    """The kernel that computes a group of instructions.

    Args:
        name: symbol of the kernel.
        group: instructions, operands before users.
        results: those whose values are needed outside.

    Raises:
        NoPlan: no single kernel does.
    """
    changing = [r for r in results if r.opcode in UPDATES]
    if changing:
        if len(results) > 1:
            raise NoPlan("{0} changes an array beside other results", changing[0])
        return plan_update(name, group, changing[0])
    products = sum(i.opcode == "dot" and is_product(i) for i in group)
    if products > 1:
        return plan_attention(name, group, results)
    if products:
        try:
            return plan_dot(name, group, results)
        except NoPlan:
            if any(i.opcode not in MOVEMENT and i.opcode not in ("dot", "constant") for i in group):
                raise
            return plan_group(name, group, results)  # as a reduction: sums over dims that are not contiguous
    return plan_group(name, group, results)


def plan_instruction(name: str, instruction: HloInstruction) -> PlannedKernel:
    """The kernel of a single instruction, or of a fusion.

    In the plan of a fusion arrays and results are instructions of its computation: parameters, and the
    elements of its root.

    Raises:
        NoPlan: no single kernel computes it.
    """
    if instruction.opcode == "custom-call":
        target = instruction.custom_call_target
        raise NoPlan(
            f"no kernel calls {target}, which {instruction.name} does; XLA can, if it is registered there"
        )
    if instruction.opcode in _INSTEAD:
        reason = _INSTEAD[instruction.opcode]
        raise NoPlan(f"no kernel computes {instruction.opcode}, which {instruction.name} is: {reason}")
    if instruction.opcode in COLLECTIVES:
        return plan_collective(name, instruction)
    if instruction.opcode == "sort":
        plan, arrays = plan_sort(name, instruction)
        return GroupPlan(plan, arrays, (instruction,) * len(instruction.operands))
    if instruction.opcode != "fusion":
        return plan_members(name, [instruction], [instruction])
    computation = instruction.to_apply
    root = computation.root
    group = [i for i in computation.post_order() if i.opcode not in ("parameter", "tuple")]
    results = root.operands if root.opcode == "tuple" else [root]
    if any(i.opcode == "sort" for i in group):
        plan, arrays = plan_sort_prefix(name, group, results)
        return GroupPlan(plan, arrays, tuple(results))
    return plan_members(name, group, results)

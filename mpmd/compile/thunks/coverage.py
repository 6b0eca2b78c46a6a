"""Instructions that a target has no code for, each with the reason."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planning.kernels import PlannedKernel, plan_instruction
from mpmd.compile.kernels.planning.trace import NoPlan
from mpmd.compile.thunks.emission import SILENT, Refuses, is_device_number


def refusals(computation: HloComputation, refuses: Refuses) -> dict[HloInstruction, str]:
    """The instructions of a prepared computation that have no code → why.

    A loop or branch is refused for what it contains.  What only forwards values is never refused.

    Args:
        computation: after `pipelines.preparation`.
        refuses: of the target.
    """
    found = {i: _reason(i, refuses) for i in computation}
    return {i: reason for i, reason in found.items() if reason}


def _reason(instruction: HloInstruction, refuses: Refuses) -> str:
    """Why an instruction has no code; "" if it has."""
    planned: PlannedKernel | None = None
    if instruction.opcode in SILENT or is_device_number(instruction):
        return ""
    if instruction.opcode in ("while", "conditional"):
        for computation in instruction.called:
            for inner, reason in refusals(computation, refuses).items():
                return f"it holds {inner.name}: {reason}"
    else:
        try:
            planned = plan_instruction("kernel", instruction)
        except NoPlan as error:
            return str(error).partition("\n")[0]
    return refuses(instruction, planned)

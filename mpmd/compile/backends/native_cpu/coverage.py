"""What native code cannot be made of, instruction by instruction, each with the reason."""

from __future__ import annotations

from mpmd.compile.backends.native_cpu.storage import MEMORY
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planning.kernels import plan_instruction
from mpmd.compile.kernels.planning.trace import PAIRS, NoPlan
from mpmd.compile.thunks.emission import SILENT, is_device_number


def refusals(computation: HloComputation) -> dict[HloInstruction, str]:
    """The instructions of a prepared computation that have no native code → why.

    A loop or branch is refused for what it holds.  What only hands on values is never refused.

    Args:
        computation: after `pipelines.cpu_preparation`.
    """
    found = {i: _reason(i) for i in computation}
    return {i: reason for i, reason in found.items() if reason}


def _reason(instruction: HloInstruction) -> str:
    """Why an instruction has no native code; "" if it has."""
    if instruction.opcode in SILENT or is_device_number(instruction):
        return ""
    if instruction.opcode in ("while", "conditional"):
        for computation in instruction.called:
            for inner, reason in refusals(computation).items():
                return f"it holds {inner.name}: {reason}"
    elif instruction.opcode == "custom-call":
        return f"native code does not call {instruction.custom_call_target}"
    else:
        try:
            plan_instruction("kernel", instruction)
        except NoPlan as error:
            return str(error).partition("\n")[0]
    values = [*instruction.operands, instruction]
    for _, shape in (leaf for value in values for leaf in value.shape.leaves()):
        if shape.dtype not in MEMORY and shape.dtype not in PAIRS:
            return f"native code has no values of type {shape.dtype}"
    return ""

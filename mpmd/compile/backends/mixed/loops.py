"""Which instructions of a program are native code, and which loops hold clusters."""

from __future__ import annotations

from collections.abc import Collection

from mpmd.compile.backends.mixed.clusters import Clusters, LoopClusters, split
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.passes.simplify.loops import Counter, counter_of
from mpmd.compile.thunks.coverage import refusals
from mpmd.compile.thunks.emission import Refuses


def divide(
    module: HloModule, refuses: Refuses, left: Collection[str], counter: Counter | None = None
) -> Clusters:
    """The clusters of a program, in which a loop with some of the instructions that are left is one of them.

    Args:
        module: after `pipelines.preparation`; it stays as it is.
        refuses: of the target.
        left: opcodes of instructions that are meant to be XLA's.
        counter: of the loop of which it is the body.
    """
    refused: dict[HloInstruction, str] = {}
    loops: dict[HloInstruction, LoopClusters] = {}
    for instruction, reason in refusals(module.entry, refuses).items():
        loop = _loop(instruction, refuses, left) if left and instruction.opcode == "while" else None
        if loop is not None and loop.body.has_native:
            loops[instruction] = loop
        elif instruction.opcode in left or (loop is not None and not loop.body.reasons):
            refused[instruction] = ""
        else:
            refused[instruction] = reason
    if counter is not None:  # XLA knows how often its loop runs if it sees how it counts
        refused[module.entry.root.operands[counter.index]] = ""
    return split(module, refused, loops)


def _loop(loop: HloInstruction, refuses: Refuses, left: Collection[str]) -> LoopClusters:
    counter = counter_of(loop)
    condition, body = map(_as_program, (loop.while_condition, loop.while_body))
    return LoopClusters(
        split(condition, dict.fromkeys(condition.entry, "")),
        divide(body, refuses, left, counter),
        counter.trips if counter is not None else 1,
    )


def _as_program(computation: HloComputation) -> HloModule:
    """A copy of a module whose entry is one of its computations."""
    module = computation.module.clone()
    module.input_output_alias, module.buffer_donor = (), ()
    module.parameter_layouts = module.result_layout = None
    module.set_entry(module.computation(computation.name))
    module.remove_unreached()
    return module

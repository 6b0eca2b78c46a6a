"""Which values XLA gives one buffer: what loops and branches join, in-place results, aliased parameters."""

from __future__ import annotations

from mpmd.compile.analysis.dataflow import Dataflow, HloValue
from mpmd.compile.analysis.liveness import in_place_pairs
from mpmd.compile.hlo.instruction import HloInstruction


def shared_buffers(flow: Dataflow) -> list[list[HloValue]]:
    """The values of each buffer."""
    buffer_of = {value: [value] for value in flow.values}
    for a, b in _joined(flow):
        ours, theirs = buffer_of[a], buffer_of[b]
        if ours is not theirs:
            ours += theirs
            buffer_of.update(dict.fromkeys(theirs, ours))
    return list({id(values): values for values in buffer_of.values()}.values())


def _joined(flow: Dataflow) -> list[tuple[HloValue, HloValue]]:
    """Pairs of values that lie in the same memory."""
    pairs = []
    for phi in flow.values:
        for instruction, index in phi.positions if phi.is_phi else ():
            pairs += [(phi, flow.value_at(source, index)) for source in _sources(instruction)]
    for computation in flow.graph.sequential():
        for instruction in computation:
            for operand, inner, outer in in_place_pairs(instruction):
                read = flow.value_at(instruction.operands[operand], inner)
                pairs.append((read, flow.value_at(instruction, outer)))
    entry = flow.module.entry
    for alias in flow.module.input_output_alias:
        result = flow.value_at(entry.root, alias.output_index)
        pairs.append((result, flow.value_at(entry.parameters[alias.parameter], alias.parameter_index)))
    return pairs


def _sources(instruction: HloInstruction) -> list[HloInstruction]:
    """Where what an instruction joins may come from."""
    match instruction.opcode:
        case "parameter":
            return [s for caller in instruction.parent.callers for s in _given(caller, instruction)]
        case "while":
            return [instruction.operands[0], instruction.while_body.root]
        case "conditional":
            return [branch.root for branch in instruction.called]
    return []


def _given(caller: HloInstruction, parameter: HloInstruction) -> list[HloInstruction]:
    if caller.opcode == "while":
        return [caller.operands[0], caller.while_body.root]
    return [caller.operands[parameter.parameter_number]] if caller.opcode == "call" else []

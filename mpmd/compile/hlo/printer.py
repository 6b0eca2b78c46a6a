"""Writing modules as XLA's HLO text, which XLA parses."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import Verbatim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.header import print_header
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import print_literal
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import OPCODES
from mpmd.errors import HloError

_KEYWORDS = frozenset(
    [
        "true",
        "false",
        "inf",
        "nan",
        "HloModule",
        "ENTRY",
        "ROOT",
        "maximal",
        "replicated",
        "manual",
        "last_tile_dim_replicate",
        "shard_as",
        "shard_like",
        "unknown",
    ]
)
"""Words that XLA takes for a name only after `%`."""


def print_module(module: HloModule, metadata: bool = False) -> str:
    """The module as text: callees before callers, operands before users.

    Args:
        module: the module.
        metadata: with op names, source positions and the tables they refer to.
    """
    out = [print_header(module), ""]
    if metadata and module.tables:
        out += [module.tables, ""]
    for computation in module.call_order(printed=True):
        out += [print_computation(computation, metadata), ""]
    return "\n".join(out)


def print_computation(computation: HloComputation, metadata: bool = False) -> str:
    """One computation as text; in a scheduled module its order is the schedule."""
    entry = "ENTRY " if computation.is_entry else ""
    out = [f"{entry}{_spelled(computation.name)} {{"]
    order = list(computation) if computation.module.is_scheduled else computation.post_order()
    root = computation.root
    for instruction in order:
        out.append(f"  {'ROOT ' if instruction is root else ''}{print_instruction(instruction, metadata)}")
    thread = computation.execution_thread
    out.append("}" + (f', execution_thread="{thread}"' if thread else ""))
    return "\n".join(out)


def print_instruction(instruction: HloInstruction, metadata: bool = False) -> str:
    """One instruction as a line, without indentation and ROOT.

    Raises:
        HloError: a constant has no literal.
    """
    opcode = instruction.opcode
    if opcode == "constant":
        if instruction.literal is None:
            raise HloError(f"constant {instruction.name} has no literal")
        inside = print_literal(instruction.literal)
    elif opcode == "parameter":
        inside = str(instruction.attributes["parameter_number"])
    else:
        inside = ", ".join([_spelled(o.name) for o in instruction.operands])
    line = f"{_spelled(instruction.name)} = {instruction.shape} {opcode}({inside})"
    tail = attribute_text(instruction)
    if instruction.control_predecessors:
        before = ", ".join(_spelled(i.name) for i in instruction.control_predecessors)
        tail += f", control-predecessors={{{before}}}"
    return line + tail + _annotations(instruction, metadata)


def _spelled(name: str) -> str:
    return f"%{name}" if name in _KEYWORDS else name


def _annotations(instruction: HloInstruction, metadata: bool) -> str:
    tail = ""
    if instruction.sharding:
        tail += f", sharding={instruction.sharding}"
    if instruction.frontend_attributes:
        tail += f", frontend_attributes={instruction.frontend_attributes}"
    if metadata and instruction.metadata:
        tail += f", metadata={instruction.metadata}"
    if instruction.backend_config:
        tail += f", backend_config={instruction.backend_config}"
    return tail


def attribute_text(instruction: HloInstruction, calls: bool = True) -> str:
    """`, key=value` for the attributes of an instruction and, if asked, the computations it calls."""
    attributes = instruction.attributes
    info = OPCODES[instruction.opcode]
    out = []
    known = 1 if instruction.opcode == "parameter" else 0
    for spec in info.specs:
        if spec.name in attributes:
            known += 1
            out += [f", {key}={text}" for key, text in spec.codec.write(attributes[spec.name])]
    if known < len(attributes):
        out += [
            f", {key}={value}"
            for key, value in attributes.items()
            if isinstance(value, Verbatim) and key not in info.keyed
        ]
    if calls and instruction.called:
        out += [f", {key}={text}" for key, text in _calls(instruction)]
    return "".join(out)


def _calls(instruction: HloInstruction) -> list[tuple[str, str]]:
    names = [_spelled(c.name) for c in instruction.called]
    if instruction.opcode == "conditional":
        if instruction.operands[0].shape.dtype == "pred" and len(names) == 2:
            return list(zip(("true_computation", "false_computation"), names))
        return [("branch_computations", "{" + ", ".join(names) + "}")]
    if instruction.opcode == "custom-call":
        return [("called_computations", "{" + ", ".join(names) + "}")]
    return list(zip(OPCODES[instruction.opcode].called, names))

"""Writing modules as XLA's HLO text, which XLA parses."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.hlo.attributes import Verbatim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.header import print_header
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import print_literal
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import OPCODES
from mpmd.errors import HloError


@dataclass(frozen=True, slots=True)
class PrintOptions:
    """Settings of the printer.

    Attributes:
        metadata: op names, source positions and the tables they refer to.
        percent: `%` before names.
        elide_constants: write constants of more elements as `{...}`, which cannot be read; -1: write all.
    """

    metadata: bool = False
    percent: bool = False
    elide_constants: int = -1


_DEFAULT = PrintOptions()


def print_module(module: HloModule, options: PrintOptions = _DEFAULT) -> str:
    """The module as text: callees before callers, operands before users."""
    out = [print_header(module), ""]
    if options.metadata and module.tables:
        out += [module.tables, ""]
    for computation in module.call_order():
        out += [print_computation(computation, options), ""]
    return "\n".join(out)


def print_computation(computation: HloComputation, options: PrintOptions = _DEFAULT) -> str:
    """One computation as text; in a scheduled module its order is the schedule."""
    sign = "%" if options.percent else ""
    entry = "ENTRY " if computation.is_entry else ""
    out = [f"{entry}{sign}{computation.name} {{"]
    order = list(computation) if computation.module.is_scheduled else computation.post_order()
    root = computation.root
    for instruction in order:
        out.append(f"  {'ROOT ' if instruction is root else ''}{print_instruction(instruction, options)}")
    thread = computation.execution_thread
    out.append("}" + (f', execution_thread="{thread}"' if thread else ""))
    return "\n".join(out)


def print_instruction(instruction: HloInstruction, options: PrintOptions = _DEFAULT) -> str:
    """One instruction as a line, without indentation and ROOT.

    Raises:
        HloError: a constant has no literal.
    """
    sign = "%" if options.percent else ""
    opcode = instruction.opcode
    if opcode == "constant":
        inside = _constant(instruction, options)
    elif opcode == "parameter":
        inside = str(instruction.attributes["parameter_number"])
    elif options.percent:
        inside = ", ".join(["%" + o.name for o in instruction.operands])
    else:
        inside = ", ".join([o.name for o in instruction.operands])
    line = f"{sign}{instruction.name} = {instruction.shape} {opcode}({inside})"
    tail = attribute_text(instruction, sign)
    if instruction.control_predecessors:
        before = ", ".join(sign + i.name for i in instruction.control_predecessors)
        tail += f", control-predecessors={{{before}}}"
    return line + tail + _annotations(instruction, options)


def _constant(instruction: HloInstruction, options: PrintOptions) -> str:
    if (
        options.elide_constants >= 0
        and instruction.shape.is_array
        and instruction.shape.size > options.elide_constants
    ):
        return "{...}"
    if instruction.literal is None:
        raise HloError(f"constant {instruction.name} has no literal")
    return print_literal(instruction.literal)


def _annotations(instruction: HloInstruction, options: PrintOptions) -> str:
    tail = ""
    if instruction.sharding:
        tail += f", sharding={instruction.sharding}"
    if instruction.frontend_attributes:
        tail += f", frontend_attributes={instruction.frontend_attributes}"
    if options.metadata and instruction.metadata:
        tail += f", metadata={instruction.metadata}"
    if instruction.backend_config:
        tail += f", backend_config={instruction.backend_config}"
    return tail


def attribute_text(instruction: HloInstruction, sign: str = "", calls: bool = True) -> str:
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
        out += [f", {key}={text}" for key, text in _calls(instruction, sign)]
    return "".join(out)


def _calls(instruction: HloInstruction, sign: str) -> list[tuple[str, str]]:
    names = [sign + c.name for c in instruction.called]
    if instruction.opcode == "conditional":
        if instruction.operands[0].shape.dtype == "pred" and len(names) == 2:
            return list(zip(("true_computation", "false_computation"), names))
        return [("branch_computations", "{" + ", ".join(names) + "}")]
    if instruction.opcode == "custom-call":
        return [("called_computations", "{" + ", ".join(names) + "}")]
    return list(zip(OPCODES[instruction.opcode].called, names))

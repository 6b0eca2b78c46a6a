"""Writing modules as XLA's HLO text, which XLA parses.

A digest of a module's computation: modules with equal fingerprints compile to the same executable.

The first line of HLO text: name, schedule flag, aliasing, entry layouts, further attributes.
"""

from __future__ import annotations

import hashlib
import re

from mpmd.compile.hlo import codecs
from mpmd.compile.hlo.attributes import Verbatim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction, Literal
from mpmd.compile.hlo.literals import print_literal
from mpmd.compile.hlo.module import HloModule, reachable_from
from mpmd.compile.hlo.opcodes import OPCODES
from mpmd.compile.hlo.shape import Shape, shape_at
from mpmd.compile.hlo.text import TextError, closing, read_int, split_top
from mpmd.errors import HloError, close_to

_CARRIED = (
    "alias_passthrough_params",
    "allow_spmd_sharding_propagation_to_output",
    "allow_spmd_sharding_propagation_to_parameters",
    "frontend_attributes",
)
_READ = (
    "buffer_donor",
    "entry_computation_layout",
    "input_output_alias",
    "is_scheduled",
    "num_partitions",
    "replica_count",
)


def read_header(module: HloModule, key: str, value: str) -> None:
    """Set one attribute of the header; those without a meaning here are kept as text.

    Raises:
        TextError: the value is malformed, or the key unknown; offsets count from the value's beginning.
    """
    if key == "is_scheduled":
        module.is_scheduled = value == "true"
    elif key == "input_output_alias":
        module.input_output_alias = codecs.read_io_aliases(value)
    elif key == "buffer_donor":
        module.buffer_donor = codecs.read_donors(value)
    elif key == "entry_computation_layout":
        module.parameter_layouts, module.result_layout = _program_shape(value)
    elif key in ("replica_count", "num_partitions"):
        if re.fullmatch(r"[0-9]+", value) is None or not 0 < read_int(value) < 1 << 31:
            raise TextError(f"expected a positive number of 32 bits, got {value!r}", 0)
        setattr(module, key, int(value))
    elif key in _CARRIED:
        module.header[key] = value
    else:
        near = close_to(key, (*_READ, *_CARRIED))
        raise TextError(f"a module has no attribute {key!r}{near}", -len(key) - 1)


def _program_shape(text: str) -> tuple[tuple[Shape, ...], Shape]:
    """`{(f32[2]{0}, s32[])->pred[]}` as parameter shapes and result shape."""
    body = text.strip()[1:-1]
    close = closing(body, 0)
    parameters = tuple(shape_at(part, 0)[0] for part in split_top(body[1:close]))
    arrow = body.find("->", close)
    if arrow < 0:
        raise TextError("expected `->` and the shape of the result", close + 1)
    result, _ = shape_at(body, arrow + 2 + len(body[arrow + 2 :]) - len(body[arrow + 2 :].lstrip()))
    return parameters, result


def print_header(module: HloModule) -> str:
    parts = [f"HloModule {module.name}"]
    if module.is_scheduled:
        parts.append("is_scheduled=true")
    if module.input_output_alias:
        parts.append("input_output_alias={ " + ", ".join(map(str, module.input_output_alias)) + " }")
    if module.buffer_donor:
        parts.append("buffer_donor={ " + ", ".join(map(str, module.buffer_donor)) + " }")
    parameters, result = module.entry_shapes()
    parts.append(f"entry_computation_layout={{({', '.join(map(str, parameters))})->{result}}}")
    if module.replica_count != 1:
        parts.append(f"replica_count={module.replica_count}")
    if module.num_partitions != 1:
        parts.append(f"num_partitions={module.num_partitions}")
    parts += [f"{key}={value}" for key, value in module.header.items()]
    return ", ".join(parts)


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


def fingerprint(module: HloModule) -> str:
    """A digest of the program: names, numbers, metadata and dead computations do not count.

    It includes opcodes, shapes with layouts, operands, attributes, literals, control edges, shardings,
    backend configurations, aliasing, layouts of entry parameters and results, the number of partitions; in
    scheduled modules the order.
    """
    digest = hashlib.sha256()
    digest.update(_header(module).encode())
    known: dict[HloComputation, bytes] = {}
    reached = set(reachable_from(module.entry))
    for computation in module.call_order():
        if computation in reached:
            known[computation] = computation_digest(computation, known)
    digest.update(known[module.entry])
    return digest.hexdigest()


def computation_digest(computation: HloComputation, known: dict[HloComputation, bytes]) -> bytes:
    """The digest of one computation, given those of the computations it calls."""
    digest = hashlib.sha256()
    order = list(computation) if computation.module.is_scheduled else _canonical_order(computation)
    number = {instruction: n for n, instruction in enumerate(order)}
    for instruction in order:
        operands = ",".join([str(number[o]) for o in instruction.operands])
        line = f"{instruction.opcode} {instruction.shape} ({operands})"
        if instruction.opcode == "parameter":
            line += f" {instruction.parameter_number}"
        line += attribute_text(instruction, calls=False)
        before = [number[i] for i in instruction.control_predecessors]
        line += f" {before or ''} {instruction.sharding} {instruction.backend_config}\n"
        digest.update(line.encode())
        for callee in instruction.called:
            digest.update(known[callee])
        if instruction.literal is not None:
            _add_literal(digest, instruction.literal)
    digest.update(f"root {number[computation.root]} {computation.execution_thread}".encode())
    return digest.digest()


def _canonical_order(computation: HloComputation) -> list[HloInstruction]:
    """Operands before users, starting at the root: independent of the order of creation if possible."""
    seen: set[HloInstruction] = set()
    out: list[HloInstruction] = []
    starts = [computation.root]
    starts += [i for i in computation if not i.users and i is not computation.root]
    starts += [i for i in computation if i.users]
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        stack = [(start, iter((*start.operands, *start.control_predecessors)))]
        while stack:
            node, waiting = stack[-1]
            for before in waiting:
                if before not in seen:
                    seen.add(before)
                    stack.append((before, iter((*before.operands, *before.control_predecessors))))
                    break
            else:
                stack.pop()
                out.append(node)
    return out


def _add_literal(digest: hashlib._Hash, literal: Literal) -> None:
    if isinstance(literal, tuple):
        for element in literal:
            _add_literal(digest, element)
    else:
        digest.update(literal.tobytes())


def _header(module: HloModule) -> str:
    parameters, result = module.entry_shapes()
    parts = [
        f"scheduled={module.is_scheduled}",
        f"aliases={' '.join(map(str, module.input_output_alias))}",
        f"donors={' '.join(map(str, module.buffer_donor))}",
        f"interface={' '.join(map(str, parameters))}->{result}",
        f"replicas={module.replica_count} partitions={module.num_partitions}",
    ]
    return "\n".join(parts)

"""A digest of a module's computation: modules with equal fingerprints compile to the same executable."""

from __future__ import annotations

import hashlib

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction, Literal
from mpmd.compile.hlo.module import HloModule, reachable_from
from mpmd.compile.hlo.printer import attribute_text


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

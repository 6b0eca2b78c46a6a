"""hlo-copy-insertion."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.passes.hlo_pass import HloPass


class CopyInsertion(HloPass):
    """Gives every result of the program, of a loop's body and of a branch a value of its own.

    body: ROOT t = tuple(get-tuple-element(p), index=1 ...)  ->  tuple(copy(get-tuple-element(p)) ...)

    A parameter, a constant, or a value that is a result twice, is copied; an unchanged element of a loop's
    state is not.  A branch selected by a truth value is selected by a number instead.

    Requires: no `call`, loops and branches with bodies of their own (hlo-flatten-call-graph).
    Ensures: results can be given memory one by one, in any order.
    Cost: linear.
    Source: the second half of XLA's copy insertion; the first half, copies around updates in place, is left
        to buffer assignment, which knows where none is needed.
    """

    def rewrite(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff that changed something."""
        changed = _own_results(module.entry, keep=False)
        for computation in module.call_order():
            for instruction in computation.instructions:
                if instruction.opcode == "while":
                    changed |= _own_results(instruction.while_body, keep=True)
                    changed |= _own_results(instruction.while_condition, keep=False)
                elif instruction.opcode == "conditional":
                    for branch in instruction.called:
                        changed |= _own_results(branch, keep=False)
                    changed |= _numbered(computation, instruction)
        return changed


def _own_results(computation: HloComputation, *, keep: bool) -> bool:
    """Copies results that have no memory of their own; `keep` exempts the state that a loop forwards."""
    builder = HloBuilder(computation)
    root = computation.root
    if root.opcode != "tuple":
        if root.shape.is_tuple:
            root = builder.tuple([builder.element(root, i) for i in range(len(root.shape.elements))])
        elif _source(root) is not None:
            builder.build(builder.add("copy", root))
            return True
        else:
            return False
    seen: set[HloInstruction] = set()
    changed = root is not computation.root
    results = []
    for number, value in enumerate(root.operands):
        source = _source(value)
        stays = keep and source is not None and source.opcode == "get-tuple-element"
        if stays and source is not None and source.tuple_index == number:
            results.append(value)
        elif value.shape.is_array and (source is not None or _base(value) in seen):
            results.append(builder.add("copy", value))
            changed = True
        else:
            results.append(value)
            seen.add(_base(value))
    if changed:
        builder.build(builder.tuple(results))
        if not root.users:
            computation.remove(root)
    return changed


def _base(value: HloInstruction) -> HloInstruction:
    """The source of a value through movements without cost."""
    while True:
        source = value.operands[0] if value.operands else value
        if value.opcode in ("bitcast", "reshape", "opt-barrier") and source.shape.is_array:
            value = source
        elif value.opcode == "get-tuple-element" and source.opcode == "tuple":
            value = source.operands[value.tuple_index]
        elif value.opcode == "get-tuple-element" and source.opcode == "opt-barrier":
            inner = source.operands[0]
            if inner.opcode != "tuple":
                return value
            value = inner.operands[value.tuple_index]
        elif value.opcode == "get-tuple-element" and _is_unchanged(source, value.tuple_index):
            value = source.operands[0].operands[value.tuple_index]
        else:
            return value


def _is_unchanged(loop: HloInstruction, number: int) -> bool:
    """Whether an element of a loop's state is unchanged by the loop, and by the loops inside of it."""
    if loop.opcode != "while" or loop.operands[0].opcode != "tuple":
        return False
    body = loop.while_body
    returned = _base(body.root.operands[number]) if body.root.opcode == "tuple" else body.root
    same = returned.opcode == "get-tuple-element" and returned.tuple_index == number
    return same and returned.operands[0] is body.parameters[0]


def _source(value: HloInstruction) -> HloInstruction | None:
    """The parameter, its element, or the constant whose memory a value is; None if it has its own."""
    base = _base(value)
    if base.opcode in ("parameter", "constant"):
        return base
    if base.opcode == "get-tuple-element" and base.operands[0].opcode == "parameter":
        return base
    return None


def _numbered(computation: HloComputation, conditional: HloInstruction) -> bool:
    predicate = conditional.operands[0]
    if predicate.shape.dtype != "pred":
        return False
    builder = HloBuilder(computation)
    first, second = builder.constant(np.int32(0)), builder.constant(np.int32(1))
    conditional.replace_operand(0, builder.select(predicate, first, second))
    return True

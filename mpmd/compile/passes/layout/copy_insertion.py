"""Copies so that each result of a program, a loop's body or a branch has memory of its own.

Buffer assignment then gives them memory one by one.  A parameter or a value that is a result twice would
otherwise need two places at once.
"""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import ShapeIndex
from mpmd.compile.passes.hlo_pass import HloPass

_GIVEN = ("parameter", "constant")
_Place = tuple[HloInstruction, ShapeIndex]


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
        elif _base(root)[0].opcode in _GIVEN:
            builder.build(builder.add("copy", root))
            return True
        else:
            return False
    seen: set[_Place] = set()
    changed = root is not computation.root
    results = []
    for number, value in enumerate(root.operands):
        base = _base(value)
        if keep and base == (computation.parameters[0], (number,)):
            results.append(value)
        elif value.shape.is_array and (base[0].opcode in _GIVEN or base in seen):
            results.append(builder.add("copy", value))
            changed = True
        else:
            results.append(value)
            seen.add(base)
    if changed:
        builder.build(builder.tuple(results))
        if not root.users:
            computation.remove(root)
    return changed


def _base(value: HloInstruction, index: ShapeIndex = ()) -> _Place:
    """Whose memory a part of a value is, through what moves nothing and loops that leave it unchanged."""
    while True:
        if value.opcode == "get-tuple-element":
            value, index = value.operands[0], (value.tuple_index, *index)
        elif value.opcode == "tuple" and index:
            value, index = value.operands[index[0]], index[1:]
        elif value.opcode in ("bitcast", "reshape", "opt-barrier") or _is_unchanged(value, index):
            value = value.operands[0]
        else:
            return value, index


def _is_unchanged(value: HloInstruction, index: ShapeIndex) -> bool:
    """Whether a loop, and the loops inside of it, leave a part of its state as it is."""
    if value.opcode != "while":
        return False
    return _base(value.while_body.root, index) == (value.while_body.parameters[0], index)


def _numbered(computation: HloComputation, conditional: HloInstruction) -> bool:
    predicate = conditional.operands[0]
    if predicate.shape.dtype != "pred":
        return False
    builder = HloBuilder(computation)
    first, second = builder.constant(np.int32(0)), builder.constant(np.int32(1))
    conditional.replace_operand(0, builder.select(predicate, first, second))
    return True

"""hlo-while-invariant-code-motion."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import Category
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import remove_unused
from mpmd.compile.passes.simplify.loop_state import passes_through, widen
from mpmd.compile.passes.simplify.while_simplifier import may_change_state

_NEVER = frozenset(["parameter", "tuple", "opt-barrier", "after-all", "add-dependency", "domain", "fusion"])
_OUTSIDE = frozenset(
    {Category.CONTROL, Category.COLLECTIVE, Category.ASYNC, Category.EXTERNAL, Category.RANDOM}
)
_FREE = frozenset(["constant", "iota", "broadcast", "reshape", "bitcast", "get-tuple-element", "convert"])


class WhileInvariantCodeMotion(ComputationPass):
    """Moves loop-invariant computations before the loop.

    body: y = tanh(w); x = multiply(x, y), w passes through  ->  y before the loop, an element of its state

    Work moves only if the result is no larger than its operands; constants, broadcasts and the like move only
    where moved work needs them.

    Requires: no schedule.
    Ensures: no operation of a loop body that depends on unchanged elements alone is left but those that are
        free or would keep more bytes alive.
    Cost: linear per loop.
    Source: loop-invariant code motion; HLO has no traps, so that a loop that never runs is safe.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Moves work out of the loops of one computation."""
        changed = False
        for instruction in computation.instructions:
            if instruction.opcode == "while" and instruction.computation is not None:
                if instruction.known_trip_count != 0 and may_change_state(instruction):
                    changed |= _hoist(instruction)
        return changed


def _hoist(loop: HloInstruction) -> bool:
    fixed = _invariant(loop)
    wanted = [i for i in fixed if _is_worth(i) and any(u not in fixed or not _is_worth(u) for u in i.users)]
    if not wanted:
        return False
    copies: dict[HloInstruction, HloInstruction] = {}
    values = [_copied(i, loop, copies) for i in wanted]
    _, added = widen(loop, values)
    for instruction, value in zip(wanted, added):
        instruction.replace_all_uses_with(value)
        remove_unused(instruction)
    return True


def _invariant(loop: HloInstruction) -> dict[HloInstruction, None]:
    """Instructions of the body that are the same in each iteration, in post-order."""
    body = loop.while_body
    state = body.parameters[0]
    fixed: dict[HloInstruction, None] = {}
    for instruction in body.post_order():
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] is state:
            if passes_through(loop, instruction.tuple_index):
                fixed[instruction] = None
        elif _may_move(instruction) and all(o in fixed for o in instruction.operands):
            fixed[instruction] = None
    return fixed


def _may_move(instruction: HloInstruction) -> bool:
    if instruction.opcode in _NEVER or instruction.is_root or instruction.has_side_effect:
        return False
    if instruction.has_control_edges:
        return False
    return instruction.info.category not in _OUTSIDE


def _is_worth(instruction: HloInstruction) -> bool:
    """True for work whose result is no larger than its operands."""
    if instruction.opcode in _FREE or not instruction.shape.is_array:
        return False
    read = max((o.shape.byte_size for o in instruction.operands), default=0)
    return instruction.shape.byte_size <= max(read, 64)


def _copied(
    instruction: HloInstruction, loop: HloInstruction, copies: dict[HloInstruction, HloInstruction]
) -> HloInstruction:
    """The same value, computed before the loop."""
    found = copies.get(instruction)
    if found is not None:
        return found
    if instruction.opcode == "get-tuple-element" and instruction.operands[0] is loop.while_body.parameters[0]:
        return loop.operands[0].operands[instruction.tuple_index]
    operands = [_copied(o, loop, copies) for o in instruction.operands]
    made = copies[instruction] = loop.parent.add(instruction.clone(operands))
    return made

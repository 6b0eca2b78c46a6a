"""hlo-while-simplifier."""

from __future__ import annotations

import json

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import remove_unused
from mpmd.compile.passes.simplify.call_inliner import inline
from mpmd.compile.passes.simplify.loop_state import (
    has_plain_state,
    narrow,
    passes_through,
    readers,
)
from mpmd.compile.passes.simplify.trip_count import counter_of
from mpmd.compile.passes.values import splat


class WhileSimplifier(ComputationPass):
    """Reduces the state of loops, and removes loops that run once or never.

    while((i, x, c, dead)) with a constant c  ->  while((i, x)), c inside the body, known_trip_count

    Constants and broadcasts of constants move into the loop; unused elements are removed; a counted loop gets
    its `known_trip_count`; one that runs never becomes its initial state, one that runs once its body.

    Requires: no schedule; loops whose computations have other callers are left alone: flatten calls first.
    Ensures: each element of a plain state is read.
    Cost: linear per loop.
    Source: XLA's while simplifier and constant sinking.

    Attributes:
        largest_constant: largest constant that moves into a loop, in elements.
    """

    abandons = True
    largest_constant: int = 64

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Simplifies the loops of one computation."""
        changed = False
        for instruction in computation.instructions:
            if instruction.opcode == "while" and instruction.computation is not None:
                changed |= self._simplify(instruction)
        return changed

    def _simplify(self, loop: HloInstruction) -> bool:
        if not may_change_state(loop):
            return False
        changed = self._sink_constants(loop)
        kept = _needed(loop)
        if len(kept) < len(loop.shape.elements) and kept:
            loop = narrow(loop, kept)
            changed = True
        return _count(loop) or changed

    def _sink_constants(self, loop: HloInstruction) -> bool:
        changed = False
        for index, value in enumerate(loop.operands[0].operands):
            if not passes_through(loop, index) or not self._is_constant(value):
                continue
            for computation in loop.called:
                used = [r for r in readers(computation, index) if _computing(computation, r)]
                if used:
                    made = _copied_constant(computation, value)
                    for reader in used:
                        for user in _computing(computation, reader):
                            reader.replace_use(user, made)
                    changed = True
        return changed

    def _is_constant(self, value: HloInstruction) -> bool:
        if not value.shape.is_array:
            return False
        if value.opcode == "constant":
            return value.shape.size <= self.largest_constant
        return value.opcode == "iota" or (value.opcode == "broadcast" and splat(value) is not None)


def may_change_state(loop: HloInstruction) -> bool:
    """True if the state of a loop is plain, and its computations are its own."""
    return all(sum(c.callers.values()) == 1 for c in loop.called) and has_plain_state(loop)


def _computing(computation: HloComputation, reader: HloInstruction) -> list[HloInstruction]:
    """The users of a value that do not just pass it on to the next iteration."""
    return [user for user in reader.users if user is not computation.root or user.opcode != "tuple"]


def _copied_constant(computation: HloComputation, value: HloInstruction) -> HloInstruction:
    operands = [_copied_constant(computation, o) for o in value.operands]
    return computation.add(value.clone(operands))


def _needed(loop: HloInstruction) -> list[int]:
    """Elements that the program, the condition, an effect or another needed element reads."""
    body = loop.while_body
    reads = _elements_read(body)
    needed = {r.tuple_index for r in loop.users if r.users or r.is_root}
    needed |= {r.tuple_index for r in loop.while_condition.parameters[0].users}
    for instruction in body:
        if instruction.has_side_effect:
            needed |= reads[instruction]
    waiting = list(needed)
    while waiting:
        for index in reads[body.root.operands[waiting.pop()]]:
            if index not in needed:
                needed.add(index)
                waiting.append(index)
    return sorted(needed)


def _elements_read(body: HloComputation) -> dict[HloInstruction, frozenset[int]]:
    """For each instruction, the elements of the state that it depends on."""
    state = body.parameters[0]
    reads: dict[HloInstruction, frozenset[int]] = {}
    for instruction in body.post_order():
        if instruction is state or instruction is body.root:
            reads[instruction] = frozenset()
        elif instruction.opcode == "get-tuple-element" and instruction.operands[0] is state:
            reads[instruction] = frozenset([instruction.tuple_index])
        else:
            reads[instruction] = frozenset[int]().union(*(reads[o] for o in instruction.operands))
    return reads


def _count(loop: HloInstruction) -> bool:
    """Unroll a loop that runs once or never; record the trip count of others."""
    counter = counter_of(loop)
    if counter is None:
        return False
    if counter.trips <= 1 and not any(i.has_side_effect for i in loop.while_condition):
        init = loop.operands[0]
        if counter.trips:
            inline(loop, 1)
        else:
            loop.parent.replace(loop, init)
        remove_unused(init)
        return True
    if loop.known_trip_count == counter.trips:
        return False
    config = json.loads(loop.backend_config) if loop.backend_config else {}
    config["known_trip_count"] = {"n": str(counter.trips)}
    loop.backend_config = json.dumps(config, separators=(",", ":"))
    return True

"""hlo-while-loop-unroller."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import ELEMENTWISE, Category
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import remove_unused
from mpmd.compile.passes.simplify.trip_count import counter_of

_CHEAP = ELEMENTWISE | {Category.INPUT, Category.TUPLE, Category.SHAPE}


class WhileLoopUnroller(ComputationPass):
    """Unrolls short counted loops of elementwise work, so that they become one kernel.

    while(i < 5) { x = f(x, i) }  ->  f(f(f(f(f(x, 0), 1), 2), 3), 4)

    An example are the rounds of JAX's random numbers: each iteration would read and write all of the state.

    Requires: no schedule.
    Ensures: no loop is left that has `most_trips` iterations or fewer and whose body, elementwise work and
        movement of data, has `most_instructions` or fewer when unrolled.
    Cost: linear in the program after unrolling.
    Source: XLA's while-loop unroller.

    Attributes:
        most_trips: maximum of iterations of an unrolled loop.
        most_instructions: maximum of instructions of all iterations together.
    """

    abandons = True
    most_trips: int = 8
    most_instructions: int = 512

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Unrolls the loops of one computation."""
        changed = False
        for instruction in computation.instructions:
            if instruction.opcode == "while" and instruction.computation is not None:
                counter = counter_of(instruction)
                if counter is not None and self._is_short(instruction, counter.trips):
                    _unroll(instruction, counter.trips)
                    changed = True
        return changed

    def _is_short(self, loop: HloInstruction, trips: int) -> bool:
        if trips > self.most_trips or trips * len(loop.while_body) > self.most_instructions:
            return False
        instructions = [*loop.while_body, *loop.while_condition]
        if any(i.info.category not in _CHEAP or i.called or i.has_side_effect for i in instructions):
            return False
        return not loop.has_control_edges


def _unroll(loop: HloInstruction, trips: int) -> None:
    state = init = loop.operands[0]
    body = loop.while_body
    for _ in range(trips):
        copies = body.copy_into(loop.parent, {body.parameters[0]: state})
        state = copies[body.root]
    loop.parent.replace(loop, state)
    remove_unused(init)

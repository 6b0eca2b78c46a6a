"""Depth first: of the operands of an instruction, the one with the most behind it runs first."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.schedule.heap import Heap

_MAX_SIZE = 1 << 62


def depth_first_order(computation: HloComputation, heap: Heap) -> list[HloInstruction]:
    """Post-order in which each instruction's operands are visited by what they cost.

    Values with several users behind an operand stay alive while its siblings run, so the operand with the
    most such users comes first; among equals the one with the most bytes behind it.

    Source: XLA's DFS memory scheduler.
    """
    behind: dict[HloInstruction, tuple[int, int]] = {}
    for instruction in computation.post_order():
        extra, size = max(0, len(instruction.users) - 1), _bytes(instruction, heap)
        for operand in dict.fromkeys(instruction.operands):
            extra += behind[operand][0]
            size += behind[operand][1]
        behind[instruction] = min(extra, _MAX_SIZE), min(size, _MAX_SIZE)
    places = {instruction: place for place, instruction in enumerate(computation)}

    def costly_first(instruction: HloInstruction) -> tuple[int, int, int]:
        extra, size = behind[instruction]
        return -extra, -size, places[instruction]

    order: list[HloInstruction] = []
    done: set[HloInstruction] = set()
    ends = [i for i in computation if not i.users and not i.control_successors]
    for end in sorted(ends, key=costly_first):
        stack = [(end, False)]
        while stack:
            instruction, ready = stack.pop()
            if instruction in done:
                continue
            if ready:
                done.add(instruction)
                order.append(instruction)
                continue
            stack.append((instruction, True))
            needed = dict.fromkeys((*instruction.control_predecessors, *instruction.operands))
            stack += [(n, False) for n in sorted(needed, key=costly_first, reverse=True) if n not in done]
    return order


def _bytes(instruction: HloInstruction, heap: Heap) -> int:
    return sum(heap.sizes[v] for v in heap.traffic[instruction].defines)

"""An independent check of an assignment: no two values that are in use at the same time share a byte."""

from __future__ import annotations

from itertools import combinations

from mpmd.compile.analysis.dataflow import HloValue
from mpmd.compile.analysis.liveness import LiveRange, Occupancy, overwritten_pairs
from mpmd.compile.buffers.assignment import BufferAssignment
from mpmd.compile.buffers.sharing import MayShare
from mpmd.errors import CompileError, collect


def check_assignment(assignment: BufferAssignment, may_share: MayShare) -> None:
    """Compare all pairs of values; slow, and for tests.

    Two values may touch at one instant: where an operation may write its result over an operand, or where a
    loop or a branch forwards a value.

    Args:
        assignment: the assignment to check.
        may_share: which operands results may overwrite.

    Raises:
        CompileError: values overlap, or a slice reaches beyond its allocation; all are named.
    """
    occupancy, problems = assignment.occupancy, []
    for value, place in assignment.slices.items():
        allocation = assignment.allocations[place.allocation]
        if place.offset + place.size > allocation.size or place.size < value.byte_size:
            problems.append(f"{value} of {value.byte_size} bytes is at {place} of {allocation}")
    for a, b in combinations(assignment.slices, 2):
        if not assignment.slices[a].overlaps(assignment.slices[b]):
            continue
        touching = _may_touch_at(a, b, occupancy, may_share)
        if occupancy.conflict(a, b, touching):
            problems.append(f"{a} at {occupancy.spans[a]} and {b} at {occupancy.spans[b]} share bytes")
    if problems:
        raise collect(CompileError, problems, "the assignment of memory is wrong:")


def _may_touch_at(a: HloValue, b: HloValue, occupancy: Occupancy, may_share: MayShare) -> LiveRange | None:
    """When two values may touch; None for never."""
    for phi, other in ((a, b), (b, a)):
        if phi.is_phi and phi.instruction.opcode == "conditional":
            for branch in phi.instruction.called:
                if occupancy.dataflow.value_at(branch.root, phi.index) is other:
                    end = occupancy.liveness.time.spans[branch].end
                    return LiveRange(end, end)
    before, after = (a, b) if occupancy.first(a) < occupancy.first(b) else (b, a)
    if after.is_phi:
        return LiveRange(occupancy.first(after), occupancy.first(after))
    instruction = after.instruction
    pairs = [(o, outer) for o, _, outer in overwritten_pairs(instruction)]
    results = [index for index, _ in instruction.shape.leaves()]
    for number, operand in enumerate(instruction.operands):
        if operand.shape.is_array and occupancy.dataflow.value_at(operand) is before:
            result = results.index(after.index)
            if (number, after.index) in pairs or may_share(instruction, number, result):
                return LiveRange(occupancy.first(after), occupancy.instants[instruction])
    return None

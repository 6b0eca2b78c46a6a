"""An independent check of an assignment: no two values that are in use at the same time share a byte."""

from __future__ import annotations

from itertools import combinations

from mpmd.compile.analysis.dataflow import HloValue
from mpmd.compile.buffers.assignment import BufferAssignment
from mpmd.compile.buffers.ranges import Occupancy, loop_of
from mpmd.errors import CompileError, collect


def check_assignment(assignment: BufferAssignment) -> None:
    """Compare all pairs of values; slow, and for tests.

    Two values may touch at one instant: where an operation writes its result over an operand, or where a loop
    or a branch hands a value on.

    Raises:
        CompileError: values overlap, or a slice reaches beyond its allocation; all are named.
    """
    occupancy, problems = assignment.occupancy, []
    for value, place in assignment.slices.items():
        allocation = assignment.allocations[place.allocation]
        if place.offset + place.size > allocation.size or place.size < value.byte_size:
            problems.append(f"{value} of {value.byte_size} bytes lies at {place} of {allocation}")
    for a, b in combinations(assignment.slices, 2):
        if not assignment.slices[a].overlaps(assignment.slices[b]):
            continue
        touching = _handed_over(a, b, occupancy)
        if occupancy.conflict(a, b, touching):
            problems.append(f"{a} at {occupancy.spans[a]} and {b} at {occupancy.spans[b]} share bytes")
    if problems:
        raise collect(CompileError, problems, "the assignment of memory is wrong:")



def _handed_over(a: HloValue, b: HloValue, occupancy: Occupancy) -> int:
    """The one instant at which two values may touch."""
    for state, made in ((a, b), (b, a)):
        loop = loop_of(state)
        if loop is not None and occupancy.dataflow.value_at(loop.while_body.root, state.index) is made:
            return occupancy.instants[loop]
    return max(occupancy.first(a), occupancy.first(b))

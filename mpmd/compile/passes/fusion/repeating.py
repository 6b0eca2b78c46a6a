"""Results that are cheaper to compute again than to keep, such as forward epilogues in backward passes.

On a device that has operations to spare, an array is also computed again by functions such as tanh, and from
values of rows, which are stored for that: the differences from a mean follow from the array and the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.planner.elements import MOVEMENT
from mpmd.compile.passes.fusion.grouping import FusionGroup, Grouping
from mpmd.compile.passes.fusion.prices import CLEARLY, Prices
from mpmd.support import diagnostics

_MAX_OPERATIONS = 24
"""Maximum of operations of one repeated value: more would cost more than the memory that they save."""
_MIN_BYTES = 1024
"""Bytes: smaller values stay in the cache."""
_SMALL_PART = 8
"""A value that is so much smaller than a result is stored, and the result computed from it."""


def repeat_cheap_results(grouping: Grouping, prices: Prices) -> None:
    """Let groups compute cheap results of other groups again, where that moves less and takes no longer.

    Args:
        grouping: the groups, changed in place.
        prices: the cost model.
    """
    for group in grouping.groups():
        for result in reversed(grouping.results(group.members)):
            others = [r for r in grouping.results(group.members) if r is not result]
            if not others:
                break
            if result.shape.byte_size >= _MIN_BYTES and _saves(grouping, group, result, others):
                _try(grouping, prices, group, result, others)


def _saves(
    grouping: Grouping, group: FusionGroup, result: HloInstruction, kept: Sequence[HloInstruction]
) -> bool:
    """Whether reading the sources of a result costs less than writing and reading it.

    Args:
        grouping: the groups.
        group: the group of the result.
        result: the result.
        kept: the other results of the group.
    """
    cone = _cone(grouping, group, result, kept)
    readers = _reading_groups(grouping, group, result)
    if cone is None or not readers:
        return False
    further = 0
    for reader in readers:
        known = set(grouping.arrays(reader))
        further += sum(a.shape.byte_size for a in cone if a not in known)
    return further < (1 + len(readers)) * result.shape.byte_size


def _reading_groups(grouping: Grouping, group: FusionGroup, result: HloInstruction) -> list[FusionGroup]:
    """The groups that read a result; none if it has a reader without a group."""
    if result is grouping.computation.root:
        return []
    found: dict[FusionGroup, None] = {}
    for reader in grouping.readers(result):
        other = grouping.group_of.get(reader)
        if other is None or reader.opcode in MOVEMENT:
            return []
        if other is not group:
            found[other] = None
    return list(found)


def _cone(
    grouping: Grouping, group: FusionGroup, result: HloInstruction, kept: Sequence[HloInstruction]
) -> list[HloInstruction] | None:
    """The arrays from which a result follows by cheap elementwise work; None if it needs more."""
    arrays: dict[HloInstruction, None] = {}
    seen, waiting, operations = {result}, [result], 0
    while waiting:
        instruction = waiting.pop()
        if instruction.opcode not in MOVEMENT:
            operations += 1
            if not _is_cheap(grouping, instruction) or operations > _MAX_OPERATIONS:
                return None
        for operand in instruction.operands:
            if operand.opcode == "constant" and operand.shape.size == 1:
                continue
            inner = grouping.group_of.get(operand) is group or operand.opcode in MOVEMENT
            ends = operand in kept or _is_stored(grouping, operand, result)
            if ends or not inner or (operand.opcode in MOVEMENT and operand in grouping.group_of):
                arrays[operand] = None
            elif operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return list(arrays)


def _is_cheap(grouping: Grouping, instruction: HloInstruction) -> bool:
    """Whether a device computes an instruction again rather than that it moves an array."""
    operation = OPERATIONS.get(instruction.opcode)
    spared = grouping.limits.repeats_functions or operation is None or not operation.is_expensive
    return instruction.is_elementwise and spared


def _is_stored(grouping: Grouping, value: HloInstruction, result: HloInstruction) -> bool:
    """Whether a member becomes a result, so that another one can be computed from it."""
    small = value.shape.is_array and _SMALL_PART * value.shape.byte_size <= result.shape.byte_size
    member = value in grouping.group_of and value.opcode not in MOVEMENT
    return grouping.limits.repeats_functions and small and member


def _try(
    grouping: Grouping,
    prices: Prices,
    group: FusionGroup,
    result: HloInstruction,
    kept: Sequence[HloInstruction],
) -> None:
    """Repeat a result, unless some group is then no longer one kernel, or all together take longer."""
    cone = _members_between(grouping, group, result, kept)
    concerned = (group, *_reading_groups(grouping, group, result))
    before = prices.whole([grouping.plan(g.members) for g in concerned])
    added = cone - grouping.repeated
    grouping.repeat(added)
    planned = [grouping.plan(g.members) for g in concerned]
    if any(isinstance(plan, str) for plan in planned):
        grouping.keep(added)
        return
    after = prices.whole(planned)
    if before is not None and after is not None and after > CLEARLY * before:
        grouping.keep(added)
        diagnostics.notice(
            f"hlo-fusion: {result.name} is kept: with it kernels take {before * 1e6:.1f} us, "
            f"computing it again {after * 1e6:.1f} us"
        )


def _members_between(
    grouping: Grouping, group: FusionGroup, result: HloInstruction, kept: Sequence[HloInstruction]
) -> set[HloInstruction]:
    """A result and the members of its group in its cone, down to kept values."""
    found, waiting = {result}, [result]
    while waiting:
        for operand in waiting.pop().operands:
            mine = grouping.group_of.get(operand) is group
            movement = operand.opcode in MOVEMENT and operand not in grouping.group_of
            ends = operand in kept or operand in found or _is_stored(grouping, operand, result)
            if (mine or movement) and not ends:
                found.add(operand)
                waiting.append(operand)
    return {f for f in found if f in grouping.group_of}

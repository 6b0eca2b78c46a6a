"""Results that are cheaper to compute again than to keep, such as forward epilogues in backward passes."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.planning.trace import MOVEMENT
from mpmd.compile.passes.fusion.grouping import FusionGroup, Grouping
from mpmd.compile.passes.fusion.prices import CLEARLY, Prices
from mpmd.support import diagnostics

_MAX_OPERATIONS = 24
"""Maximum of operations of one repeated value: more would cost more than the memory that they save."""
_MIN_BYTES = 1024
"""Bytes: smaller values stay in the cache."""


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
            operation = OPERATIONS.get(instruction.opcode)
            plain = instruction.is_elementwise and (operation is None or not operation.is_expensive)
            if not plain or operations > _MAX_OPERATIONS:
                return None
        for operand in instruction.operands:
            if operand.opcode == "constant" and operand.shape.size == 1:
                continue
            inner = grouping.group_of.get(operand) is group or operand.opcode in MOVEMENT
            if operand in kept or not inner or (operand.opcode in MOVEMENT and operand in grouping.group_of):
                arrays[operand] = None
            elif operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return list(arrays)


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
            if (mine or movement) and operand not in kept and operand not in found:
                found.add(operand)
                waiting.append(operand)
    return {f for f in found if f in grouping.group_of}

"""Results that are cheaper to compute again than to keep: what backward passes read of a forward epilogue."""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.planning.trace import MOVEMENT
from mpmd.compile.passes.fusion.grouping import Group, Grouping

_MOST_OPERATIONS = 24
"""Operations of one repeated value: more would not be free beside the memory that they save."""
_SMALLEST = 1024
"""Bytes: smaller values stay in the cache anyway."""


def repeat_cheap_results(grouping: Grouping) -> None:
    """Let groups compute cheap results of other groups again, where that moves fewer bytes."""
    for group in grouping.groups():
        results = grouping.results(group.members)
        for result in reversed(results):
            if len(grouping.results(group.members)) < 2:
                break
            if result.shape.byte_size >= _SMALLEST and _saves(grouping, group, result):
                _try(grouping, group, result)


def _saves(grouping: Grouping, group: Group, result: HloInstruction) -> bool:
    """Whether reading what a result is made of costs less than writing and reading the result."""
    cone = _cone(grouping, group, result)
    readers = _reading_groups(grouping, group, result)
    if cone is None or not readers:
        return False
    further = 0
    for reader in readers:
        known = set(grouping.arrays(reader))
        further += sum(a.shape.byte_size for a in cone if a not in known)
    return further < (1 + len(readers)) * result.shape.byte_size


def _reading_groups(grouping: Grouping, group: Group, result: HloInstruction) -> list[Group]:
    """The groups that read a result; none if something reads it that is no group."""
    if result is grouping.computation.root:
        return []
    found: dict[Group, None] = {}
    for reader in grouping.readers(result):
        other = grouping.group_of.get(reader)
        if other is None or reader.opcode in MOVEMENT:
            return []
        if other is not group:
            found[other] = None
    return list(found)


def _cone(grouping: Grouping, group: Group, result: HloInstruction) -> list[HloInstruction] | None:
    """The arrays that a result is made of by cheap elementwise work; None if it is made by more."""
    kept = {r for r in grouping.results(group.members) if r is not result}
    arrays: dict[HloInstruction, None] = {}
    seen, waiting, operations = {result}, [result], 0
    while waiting:
        instruction = waiting.pop()
        if instruction.opcode not in MOVEMENT:
            operations += 1
            operation = OPERATIONS.get(instruction.opcode)
            plain = instruction.is_elementwise and (operation is None or not operation.is_expensive)
            if not plain or operations > _MOST_OPERATIONS:
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


def _try(grouping: Grouping, group: Group, result: HloInstruction) -> None:
    """Repeat a result, unless some group is then no longer one kernel."""
    readers = _reading_groups(grouping, group, result)
    cone = _members_between(grouping, group, result)
    added = cone - grouping.repeated
    grouping.repeat(added)
    if any(isinstance(grouping.plan(g.members), str) for g in (group, *readers)):
        grouping.keep(added)


def _members_between(grouping: Grouping, group: Group, result: HloInstruction) -> set[HloInstruction]:
    """A result and the members of its group that it is made of, down to other results."""
    kept = {r for r in grouping.results(group.members) if r is not result}
    found, waiting = {result}, [result]
    while waiting:
        for operand in waiting.pop().operands:
            mine = grouping.group_of.get(operand) is group
            movement = operand.opcode in MOVEMENT and operand not in grouping.group_of
            if (mine or movement) and operand not in kept and operand not in found:
                found.add(operand)
                waiting.append(operand)
    return {f for f in found if f in grouping.group_of}

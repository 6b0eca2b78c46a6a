"""Results that are cheaper to compute again than to keep: what backward passes read of a forward epilogue."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.planning.trace import MOVEMENT
from mpmd.compile.passes.fusion.grouping import FusionGroup, Grouping
from mpmd.compile.passes.fusion.prices import CLEARLY, Prices
from mpmd.support import diagnostics

_MAX_OPERATIONS = 24
"""Operations of one repeated value: more would not be free beside the memory that they save."""
_MIN_BYTES = 1024
"""Bytes: smaller values stay in the cache anyway."""


def repeat_cheap_results(grouping: Grouping, prices: Prices) -> None:
    """Let groups compute cheap results of other groups again, where that moves less and takes no longer.

    Args:
        grouping: the groups, changed in place.
        prices: what says how long kernels take.
    """
    for group in grouping.groups():
        for result in reversed(grouping.results(group.members)):
            if len(grouping.results(group.members)) < 2:
                break
            if result.shape.byte_size >= _MIN_BYTES and _saves(grouping, group, [result]):
                _try(grouping, prices, group, [result])
        _duplicate_expensive_values(grouping, prices, group)


def _duplicate_expensive_values(grouping: Grouping, prices: Prices, group: FusionGroup) -> None:
    """Hand out one value that is dear instead of several results that are cheaply made of it.

    (1 + tanh x) / 2 and (1 + tanh x) (1 - tanh x), of which neither gives the other, are both made of tanh x.
    """
    results = grouping.results(group.members)
    if len(results) < 2:
        return
    for value in [m for m in group.members if m not in results and _is_expensive(m)]:
        made = []
        for result in grouping.results(group.members):
            others = [r for r in grouping.results(group.members) if r is not result]
            cone = _cone(grouping, group, [result], [*others, value])
            factor = any(r.opcode == "dot" for r in grouping.readers(result))  # products read what is there
            if cone is not None and value in cone and not factor:
                made.append(result)
        if len(made) > 1 and value.shape.byte_size >= _MIN_BYTES and _saves(grouping, group, made, value):
            _try(grouping, prices, group, made, value)


def _is_expensive(member: HloInstruction) -> bool:
    operation = OPERATIONS.get(member.opcode)
    return member.is_elementwise and operation is not None and operation.is_expensive


def _saves(
    grouping: Grouping,
    group: FusionGroup,
    made: Sequence[HloInstruction],
    value: HloInstruction | None = None,
) -> bool:
    """Whether reading what results are made of costs less than writing and reading them.

    Args:
        grouping: the groups.
        group: the one that gives the results.
        made: the results.
        value: what the group gives instead, if anything.
    """
    cone = _cone(grouping, group, made, _kept(grouping, group, made, value))
    read = {result: _reading_groups(grouping, group, result) for result in made}
    if cone is None or not all(read.values()):
        return False
    further = value.shape.byte_size if value is not None else 0
    for reader in dict.fromkeys(r for readers in read.values() for r in readers):
        known = set(grouping.arrays(reader))
        further += sum(a.shape.byte_size for a in cone if a not in known)
    return further < sum((1 + len(readers)) * result.shape.byte_size for result, readers in read.items())


def _kept(
    grouping: Grouping, group: FusionGroup, made: Sequence[HloInstruction], value: HloInstruction | None
) -> list[HloInstruction]:
    """What a group gives when it gives some results no more, but a value instead."""
    kept = [r for r in grouping.results(group.members) if r not in made]
    return kept if value is None else [*kept, value]


def _reading_groups(grouping: Grouping, group: FusionGroup, result: HloInstruction) -> list[FusionGroup]:
    """The groups that read a result; none if something reads it that is no group."""
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
    grouping: Grouping, group: FusionGroup, made: Sequence[HloInstruction], kept: Sequence[HloInstruction]
) -> list[HloInstruction] | None:
    """The arrays that results are made of by cheap elementwise work; None if they are made by more."""
    arrays: dict[HloInstruction, None] = {}
    seen, waiting, operations = set(made), list(made), 0
    while waiting:
        instruction = waiting.pop()
        if instruction.opcode not in MOVEMENT:
            operations += 1
            operation = OPERATIONS.get(instruction.opcode)
            plain = instruction.is_elementwise and (operation is None or not operation.is_expensive)
            if not plain or operations > _MAX_OPERATIONS * len(made):
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
    made: Sequence[HloInstruction],
    value: HloInstruction | None = None,
) -> None:
    """Repeat results, unless some group is then no longer one kernel, or all together take longer."""
    readers = dict.fromkeys(r for result in made for r in _reading_groups(grouping, group, result))
    cone = _members_between(grouping, group, made, _kept(grouping, group, made, value))
    concerned = (group, *readers)
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
        names = " and ".join(m.name for m in made)
        diagnostics.notice(
            f"hlo-fusion: {names} is kept: with it kernels take {before * 1e6:.1f} us, "
            f"computing it again {after * 1e6:.1f} us"
        )


def _members_between(
    grouping: Grouping, group: FusionGroup, made: Sequence[HloInstruction], kept: Sequence[HloInstruction]
) -> set[HloInstruction]:
    """Results and the members of their group that they are made of, down to what is kept."""
    found, waiting = set(made), list(made)
    while waiting:
        for operand in waiting.pop().operands:
            mine = grouping.group_of.get(operand) is group
            movement = operand.opcode in MOVEMENT and operand not in grouping.group_of
            if (mine or movement) and operand not in kept and operand not in found:
                found.add(operand)
                waiting.append(operand)
    return {f for f in found if f in grouping.group_of}

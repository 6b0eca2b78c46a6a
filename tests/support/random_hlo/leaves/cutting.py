"""A program in two: one that computes some of its values, and one that goes on from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule


@dataclass(frozen=True)
class Cut:
    """The two parts of a program.

    Attributes:
        first: returns a tuple of the values that the second part reads.
        second: returns what the whole program does; its last parameters are the results of the first.
        given: to each part, the numbers of the program's parameters that it takes.
    """

    first: HloModule
    second: HloModule
    given: tuple[tuple[int, ...], tuple[int, ...]]


def cut(module: HloModule, position: int) -> Cut | None:
    """The program before and after an instruction of its entry; None if no value passes between them.

    Args:
        module: what to cut.
        position: how many instructions, operands before users, come before the cut.
    """
    first, second = module.clone(), module.clone()
    before = _before(first.entry, position)
    live = [i for i in before if _is_value(i) and (i.is_root or any(u not in before for u in i.users))]
    if not live:
        return None
    taken = {i.uid: i for i in second.entry}
    _take_values(second.entry, [taken[i.uid] for i in live], {taken[i.uid] for i in before})
    first.entry.set_root(HloBuilder(first.entry).tuple(live))
    given = []
    for part in (first, second):
        _remove_unread(part.entry)
        part.remove_unreached()
        given.append(_remove_parameters(part.entry, module.entry.parameters))
    return Cut(first, second, (given[0], given[1]))


def _is_value(instruction: HloInstruction) -> bool:
    return instruction.opcode not in ("parameter", "constant", "tuple")


def _before(entry: HloComputation, position: int) -> dict[HloInstruction, None]:
    """The instructions before a cut; what takes a tuple apart is on the side of the tuple."""
    before = dict.fromkeys(entry.post_order()[:position])
    for instruction in list(before):
        if instruction.shape.is_tuple and instruction.opcode != "tuple":
            before |= dict.fromkeys(u for u in instruction.users if u.opcode == "get-tuple-element")
    return before


def _take_values(
    entry: HloComputation, values: Sequence[HloInstruction], before: set[HloInstruction]
) -> None:
    """Let what comes after the cut read parameters instead of values."""
    build = HloBuilder(entry)
    for value in values:
        parameter = build.parameter(value.shape)
        for user in list(value.users):
            # a tuple before the cut may be what something after it reads
            if user not in before or user.opcode == "tuple":
                value.replace_use(user, parameter)


def _remove_unread(entry: HloComputation) -> None:
    for instruction in reversed(entry.post_order()):
        if not instruction.users and not instruction.is_root and instruction.opcode != "parameter":
            entry.remove(instruction)


def _remove_parameters(entry: HloComputation, original: Sequence[HloInstruction]) -> tuple[int, ...]:
    """The numbers of the original parameters that are read; the others are removed."""
    unread = [p.parameter_number for p in entry.parameters[: len(original)] if not p.users]
    for number in reversed(unread):
        entry.remove_parameter(number)
    return tuple(n for n in range(len(original)) if n not in unread)

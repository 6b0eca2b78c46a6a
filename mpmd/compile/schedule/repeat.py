"""Computes one instruction a second time, later in the schedule, for its late readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mpmd.compile.analysis.dataflow import HloValue
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.kernels.planning import NoPlan, plan_instruction

_FORWARDS = frozenset(("bitcast", "get-tuple-element"))


@dataclass
class Repetition:
    """A change, with the data to undo it.

    Attributes:
        copy: the second computation of the instruction.
        added: everything that was added, the copy first.
        redirected: (reader, number of an operand, the old operand).
        order: of the computation, before.
    """

    copy: HloInstruction
    added: list[HloInstruction] = field(default_factory=list)
    redirected: list[tuple[HloInstruction, int, HloInstruction]] = field(default_factory=list)
    order: list[HloInstruction] = field(default_factory=list)

    def undo(self) -> None:
        computation = self.copy.parent
        module = computation.module
        for reader, number, old in self.redirected:
            reader.replace_operand(number, old)
        for instruction in reversed(self.added):
            computation.remove(instruction)
        for body in self.copy.called:
            if not body.callers:
                module.remove_computation(body)
        computation.reorder(self.order)


def repeat(
    instruction: HloInstruction,
    order: Sequence[HloInstruction],
    late: Mapping[HloValue, Sequence[HloInstruction]],
) -> Repetition | None:
    """Compute results again before the first of their late readers, who read the copy from then on.

    Args:
        instruction: the instruction to compute again.
        order: of its computation.
        late: results with their late readers, in order.

    Returns:
        The change; None if a late reader gets a result in a way that cannot be redirected, or if no kernel
        computes the needed results of a fusion alone.
    """
    readers = {r: None for found in late.values() for r in found}
    if not readers or not _reachable(instruction, readers):
        return None
    computation = instruction.parent
    wanted = [v.index[0] for v in late if v.index]
    copy, renumbered = _copy(instruction, wanted)
    computation.add(copy)
    if _loses_kernel(instruction, copy):
        _remove_unused(copy)
        return None
    done = Repetition(copy, [copy], [], list(order))
    copies: dict[HloInstruction, HloInstruction] = {instruction: copy}
    for reader in readers:
        for number, operand in enumerate(reader.operands):
            chain = _chain(operand, instruction)
            if chain and _is_wanted(chain, renumbered):
                for link in reversed(chain):
                    _extend(link, copies, renumbered, done)
                done.redirected.append((reader, number, operand))
                reader.replace_operand(number, copies[operand])
    first = min(order.index(r) for r in readers)
    computation.reorder([*order[:first], *done.added, *order[first:]])
    return done


def _reachable(instruction: HloInstruction, readers: Iterable[HloInstruction]) -> bool:
    """Whether late readers get the instruction's results directly, or through bitcasts and elements alone."""
    return all(any(_chain(o, instruction) for o in reader.operands) for reader in readers)


def _is_wanted(chain: Sequence[HloInstruction], renumbered: Mapping[int, int]) -> bool:
    """Whether a chain leads to a result that the copy has."""
    element = chain[-2] if len(chain) > 1 else chain[-1]
    return element.opcode != "get-tuple-element" or element.tuple_index in renumbered


def trim(instruction: HloInstruction) -> None:
    """Remove an unused instruction, or the unused results of a fusion."""
    computation = instruction.parent
    for user in list(instruction.users):
        _remove_unused(user)
    if not instruction.users:
        _remove_unused(instruction)
        return
    if instruction.opcode != "fusion" or not instruction.shape.is_tuple:
        return
    if any(u.opcode != "get-tuple-element" for u in instruction.users):
        return
    wanted = sorted({u.tuple_index for u in instruction.users})
    if len(wanted) == len(instruction.shape.elements):
        return
    order = list(computation)
    copy, renumbered = _copy(instruction, wanted)
    computation.add(copy)
    if _loses_kernel(instruction, copy):
        _remove_unused(copy)
        return
    for element in list(instruction.users):
        if copy.shape.is_tuple:
            element.replace_operand(0, copy)
            element.attributes["index"] = renumbered[element.tuple_index]
        else:
            element.replace_all_uses_with(copy)
            computation.remove(element)
            order.remove(element)
    order[order.index(instruction)] = copy
    _remove_unused(instruction)
    computation.reorder(order)


def _loses_kernel(whole: HloInstruction, part: HloInstruction) -> bool:
    """Whether a fusion has a kernel, and the rest of it has one, too."""
    fewer = part.opcode == "fusion" and part.shape is not whole.shape
    return fewer and _has_kernel(whole) and not _has_kernel(part)


def _has_kernel(fusion: HloInstruction) -> bool:
    try:
        plan_instruction("kernel", fusion)
    except NoPlan:
        return False
    return True


def _remove_unused(instruction: HloInstruction) -> None:
    """Remove an instruction, its bodies, and the chains of bitcasts and elements after it, if unused."""
    for user in list(instruction.users):
        if user.opcode in _FORWARDS:
            _remove_unused(user)
    computation = instruction.parent
    if instruction.users or instruction is computation.root:
        return
    computation.remove(instruction)
    for body in dict.fromkeys(instruction.called):
        if not body.callers:
            computation.module.remove_computation(body)


def _chain(operand: HloInstruction, source: HloInstruction) -> list[HloInstruction]:
    """The operand and the chain between it and a source, the source last; empty if there is none."""
    found = [operand]
    while found[-1] is not source:
        if found[-1].opcode not in _FORWARDS:
            return []
        found.append(found[-1].operands[0])
    return found


def _extend(
    link: HloInstruction,
    copies: dict[HloInstruction, HloInstruction],
    renumbered: Mapping[int, int],
    done: Repetition,
) -> None:
    """The same step from the copy as from the original."""
    if link in copies:
        return
    source = copies[link.operands[0]]
    if link.opcode == "get-tuple-element" and source is done.copy:
        if not source.shape.is_tuple:
            copies[link] = source
            return
        made = HloInstruction(
            "get-tuple-element", link.shape, [source], {"index": renumbered[link.tuple_index]}
        )
    else:
        made = link.clone([source])
    copies[link] = done.copy.parent.add(made)
    done.added.append(made)


def _copy(instruction: HloInstruction, wanted: Sequence[int]) -> tuple[HloInstruction, dict[int, int]]:
    """A copy of an instruction, of a fusion only with the wanted results; old number of a result → new."""
    same = {k: k for k in range(max(1, len(instruction.shape.elements)))}
    if instruction.opcode != "fusion":
        return instruction.clone(list(instruction.operands)), same
    body = instruction.to_apply.clone()
    results = sorted(set(wanted))
    if not instruction.shape.is_tuple or len(results) == len(instruction.shape.elements):
        copy = instruction.clone(list(instruction.operands))
        copy.set_called((body,))
        return copy, same
    elements = [body.root.operands[k] for k in results]
    tuple_ = body.root
    if len(elements) == 1:
        body.set_root(elements[0])
    else:
        body.set_root(body.add(HloInstruction("tuple", tuple_of([e.shape for e in elements]), elements)))
    body.remove(tuple_)
    operands = _trimmed(body, list(instruction.operands))
    copy = HloInstruction("fusion", body.root.shape, operands, dict(instruction.attributes), (body,))
    copy.copy_annotations(instruction)
    return copy, {old: new for new, old in enumerate(results)}


def _trimmed(body: HloComputation, operands: list[HloInstruction]) -> list[HloInstruction]:
    """Remove unused instructions from a body; returns the remaining operands."""
    for instruction in reversed(body.post_order()):
        if not instruction.users and instruction is not body.root and instruction.opcode != "parameter":
            body.remove(instruction)
    for number in reversed(range(len(operands))):
        parameter = body.parameters[number]
        if not parameter.users and parameter is not body.root:
            body.remove_parameter(number)
            del operands[number]
    return operands

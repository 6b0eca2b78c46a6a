"""Groups as fusion instructions."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.passes.fusion.grouping import Group, Grouping


def outline(grouping: Grouping) -> bool:
    """Replace every group of several instructions by a fusion; True if there was one."""
    work = []
    for group in grouping.groups():
        results = grouping.results(group.members)
        closure = _needed(grouping.closure(group.members), results)
        if len(closure) > 1 and results:
            work.append((group, closure, results))
    for group, closure, results in work:
        _replace(grouping.computation, group, closure, results)
    removed = _remove_unused(grouping.computation)
    return bool(work) or removed


def _needed(closure: Sequence[HloInstruction], results: Sequence[HloInstruction]) -> list[HloInstruction]:
    """The part of a closure that its results need."""
    inside, needed = set(closure), set(results)
    for instruction in reversed(closure):
        if instruction in needed:
            needed.update(o for o in instruction.operands if o in inside)
    return [i for i in closure if i in needed]


def _replace(
    computation: HloComputation,
    group: Group,
    closure: Sequence[HloInstruction],
    results: Sequence[HloInstruction],
) -> None:
    inside = set(closure)
    arrays = list(dict.fromkeys(o for i in closure for o in i.operands if o not in inside))
    body = computation.module.create_computation("fused")
    copies: dict[HloInstruction, HloInstruction] = {}
    for number, array in enumerate(arrays):
        copies[array] = body.add(HloInstruction("parameter", array.shape, (), {"parameter_number": number}))
    for instruction in closure:
        copies[instruction] = body.add(instruction.clone([copies[o] for o in instruction.operands]))
    shape = results[0].shape
    if len(results) == 1:
        body.set_root(copies[results[0]])
    else:
        shape = tuple_of([r.shape for r in results])
        body.set_root(body.add(HloInstruction("tuple", shape, [copies[r] for r in results])))
    kind = "kOutput" if group.product else "kInput" if group.reduces else "kLoop"
    fusion = HloInstruction("fusion", shape, arrays, {"kind": kind}, (body,))
    fusion.metadata = results[-1].metadata
    computation.add(fusion)
    if len(results) == 1:
        results[0].replace_all_uses_with(fusion)
        return
    for number, result in enumerate(results):
        element = HloInstruction("get-tuple-element", result.shape, [fusion], {"index": number})
        result.replace_all_uses_with(computation.add(element))


def _remove_unused(computation: HloComputation) -> bool:
    """Take out what nobody reads any more."""
    removed = False
    for instruction in reversed(computation.post_order()):
        dead = not instruction.users and instruction is not computation.root
        if dead and instruction.opcode != "parameter" and not instruction.has_side_effect:
            computation.remove(instruction)
            removed = True
    return removed

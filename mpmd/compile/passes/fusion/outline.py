"""Groups as fusion instructions."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.passes.fusion.grouping import Grouping, needed_of


class Outlining:
    """Groups of one computation that become fusions, all at once, from the unchanged computation.

    Args:
        computation: their computation.
    """

    def __init__(self, computation: HloComputation) -> None:
        self.computation = computation
        self._made: list[tuple[HloInstruction, Sequence[HloInstruction]]] = []

    def arrays(
        self, members: Sequence[HloInstruction], results: Sequence[HloInstruction]
    ) -> list[HloInstruction]:
        """The operands of a fusion of members with given results."""
        needed = needed_of(members, results)
        inside = set(needed)
        return list(dict.fromkeys(o for i in needed for o in i.operands if o not in inside))

    def add(self, members: Sequence[HloInstruction], results: Sequence[HloInstruction], kind: str) -> None:
        """Make a fusion.

        Args:
            members: its body, operands before users.
            results: those of them that are read outside.
            kind: of the fusion.
        """
        arrays = self.arrays(members, results)
        members = needed_of(members, results)
        body = self.computation.module.create_computation("fused")
        copies: dict[HloInstruction, HloInstruction] = {}
        for number, array in enumerate(arrays):
            parameter = HloInstruction("parameter", array.shape, (), {"parameter_number": number})
            copies[array] = body.add(parameter)
        for instruction in members:
            copies[instruction] = body.add(instruction.clone([copies[o] for o in instruction.operands]))
        shape = results[0].shape
        if len(results) == 1:
            body.set_root(copies[results[0]])
        else:
            shape = tuple_of([r.shape for r in results])
            body.set_root(body.add(HloInstruction("tuple", shape, [copies[r] for r in results])))
        fusion = HloInstruction("fusion", shape, arrays, {"kind": kind}, (body,))
        fusion.metadata = results[-1].metadata
        self._made.append((self.computation.add(fusion), results))

    def finish(self) -> bool:
        """Replace the members by the fusions; True if anything changed."""
        for fusion, results in self._made:
            if len(results) == 1:
                results[0].replace_all_uses_with(fusion)
                continue
            for number, result in enumerate(results):
                element = HloInstruction("get-tuple-element", result.shape, [fusion], {"index": number})
                result.replace_all_uses_with(self.computation.add(element))
        removed = remove_all_unused(self.computation)
        return bool(self._made) or removed


def outline(grouping: Grouping) -> bool:
    """Replace every group of several instructions by a fusion; True if there was one."""
    outlining = Outlining(grouping.computation)
    for group in grouping.groups():
        results = grouping.results(group.members)
        closure = needed_of(grouping.closure(group.members), results)
        if len(closure) > 1 and results:
            kind = "kOutput" if group.product else "kInput" if group.reduces else "kLoop"
            outlining.add(closure, results, kind)
    return outlining.finish()


def remove_all_unused(computation: HloComputation) -> bool:
    removed = False
    for instruction in reversed(computation.post_order()):
        dead = not instruction.users and instruction is not computation.root
        if dead and instruction.opcode != "parameter" and not instruction.has_side_effect:
            computation.remove(instruction)
            removed = True
    return removed

"""Sorts of which only the first elements are read: one kernel that selects them.

A kernel that knows how many elements are wanted need not order the others.
"""

from __future__ import annotations

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.kernels.planner.elements import MOVEMENT
from mpmd.compile.kernels.planner.sorting import first_elements
from mpmd.compile.passes.fusion.grouping import Outlining
from mpmd.compile.passes.hlo_pass import HloPass


class SortPrefix(HloPass):
    """Forms one kernel of a sort and slices that take only its first elements.

    s = sort(x, iota), n=768; ROOT v = slice(s[0]), [0:8]  ->  ROOT f = fusion(x), kind=kCustom

    A kernel with a known number of wanted elements need not sort the others, nor read positions from memory.
    Slices shorter than the longest become slices of its result.

    Requires: no `call`.
    Ensures: every new fusion is one kernel.
    Cost: linear.
    Source: XLA's top-k rewriter, which matches sorts by a plain comparison.

    Attributes:
        most: first elements per row; beyond that sorting is faster.
    """

    most: int = 128

    def rewrite(self, module: HloModule) -> bool:
        changed = False
        for computation in CallGraph(module).sequential():
            changed |= self._rewrite(computation)
        return changed

    def _rewrite(self, computation: HloComputation) -> bool:
        outlining = Outlining(computation)
        for sort in [i for i in computation.post_order() if i.opcode == "sort"]:
            taken = _taken(sort)
            if taken and taken <= self.most:
                _outline(outlining, sort, taken)
        return outlining.finish()


def _elements(sort: HloInstruction) -> list[HloInstruction]:
    """The results of a sort that are used; the sort itself if it has one."""
    return list(sort.users) if sort.shape.is_tuple else [sort]


def _taken(sort: HloInstruction) -> int:
    """How many first elements of each row of a sort are used; 0 if all may be."""
    (along,), elements = sort.dimensions, _elements(sort)
    if sort.is_root or any(
        e.is_root or (e is not sort and e.opcode != "get-tuple-element") for e in elements
    ):
        return 0
    users = [u for e in elements for u in e.users]
    if not users or any(u.opcode != "slice" for u in users):
        return 0
    if any(i.has_control_edges for i in (sort, *elements, *users)):
        return 0
    taken = max(u.slice_dims.limits[along] for u in users)
    return taken if taken < sort.operands[0].shape.dims[along] else 0


def _outline(outlining: Outlining, sort: HloInstruction, taken: int) -> None:
    """Form a fusion of a sort, the cone of its positions, and the prefixes of all its results."""
    computation, (along,), dims = outlining.computation, sort.dimensions, sort.operands[0].shape.dims
    first = first_elements((*dims[:along], taken, *dims[along + 1 :]))
    used = {e.tuple_index if e is not sort else 0: e for e in _elements(sort)}
    elements, results = [], []
    for number, operand in enumerate(sort.operands):
        element = used.get(number)
        if element is None:
            element = HloInstruction("get-tuple-element", operand.shape, [sort], {"index": number})
            computation.add(element)
        shape = operand.shape.with_dims(first.limits)
        beginning = computation.add(HloInstruction("slice", shape, [element], {"slice": first}))
        for user in [u for u in element.users if u is not beginning]:
            if user.slice_dims == first:
                user.replace_all_uses_with(beginning)
            else:
                user.replace_operand(0, beginning)
        elements.append(element)
        results.append(beginning)
    positions = [p for o in sort.operands if _follows_from_position(o) for p in _sources(o)]
    members = dict.fromkeys((*positions, sort, *(e for e in elements if e is not sort), *results))
    outlining.add(list(members), results, "kCustom")


def _follows_from_position(value: HloInstruction) -> bool:
    """Whether a value is an iota, moved or not: a kernel computes it where it needs it."""
    if value.opcode in MOVEMENT and value.operands:
        return _follows_from_position(value.operands[0])
    return value.opcode == "iota"


def _sources(value: HloInstruction) -> list[HloInstruction]:
    return [*(s for o in value.operands for s in _sources(o)), value]

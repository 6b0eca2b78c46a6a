"""mpmd-combine-tasks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies
from mpmd.passes.fragments.editing import merge
from mpmd.passes.schedule.reorder import describe, tasks_of
from mpmd.scheduling.table import TaskOrders
from mpmd.support import diagnostics

_NO_ORDERS = TaskOrders()

Pair = tuple[ir.Fragment, ir.Fragment]


class CombineTasks(FunctionPass):
    """Merges pairs of tasks that a table runs together: a forward, and the backward of another microbatch.

    With `orders=m1:0F0,0F1+0B0,0B1`:

        g = m1["f"] cc=1 (b) { x = add b b; ret x }       g, h = m1["f", "f"(1)] (b, f) {
        h = m1["f"(1)] cc=0 (f) { y = neg f; ret y }  ->     x = add b b; y = neg f; ret x, y
                                                          } cc=0

    A compiler then has both in one program, and can run the collectives of one, such as the all-to-all of a
    mixture of experts, beside the computation of the other.  The results of either are there when both are
    done, and it begins when the operands of both are.  It is of the microbatch of the backward.

    Requires: neither of a pair needs the other, directly or through other meshes, while every mesh runs its
        fragments in their order and its pairs as one.  A pair that does stays two, with a warning.
    Ensures: the order of each mesh; no mesh waits for itself.  Cost: linear for each pair left apart.
    Source: ours; the idea is from Megatron-LM's combined 1F1B and DeepSeek's DualPipe.

    Attributes:
        orders: for each mesh its tasks in order, those run together with a `+` between.
    """

    runs_on = "entry"
    orders: TaskOrders = _NO_ORDERS

    def rewrite_function(self, f: ir.Func) -> None:
        """Leaves pairs apart as long as there is a cycle, merges the others, and sorts."""
        of_task = tasks_of(f)
        pairs = [
            (of_task[a][0], of_task[b][0])
            for a, b in self.orders.pairs
            if len(of_task.get(a, ())) == len(of_task.get(b, ())) == 1
        ]
        while cycle := _cycle(f, pairs):
            apart = next(pair for pair in pairs if not cycle.isdisjoint(pair))
            pairs.remove(apart)
            first, second = map(describe, apart)
            diagnostics.warning(
                f"{first} and {second} are not one program, as the schedule has it: one waits for the other",
                apart[0].location,
            )
        if not pairs:
            return
        groups = _groups(f, pairs)
        for mesh, row in groups.items():
            groups[mesh] = [(_merged(*group),) if len(group) == 2 else group for group in row]
        ir.reorder(f, Dependencies(f, _in_order(groups)).top_down())


Groups = dict[str, list[tuple[ir.Fragment, ...]]]


def _groups(f: ir.Func, pairs: Sequence[Pair]) -> Groups:
    """The named fragments of each mesh in order; a pair is together, in the place of its first."""
    first = dict(pairs)
    second = {b for _, b in pairs}
    groups: Groups = {}
    for fragment in ir.fragments(f):
        if fragment.is_user and fragment not in second:
            group = (fragment, first[fragment]) if fragment in first else (fragment,)
            groups.setdefault(fragment.mesh, []).append(group)
    return groups


def _in_order(groups: Groups) -> list[tuple[ir.Op, ir.Op]]:
    """Each group before the next one of its mesh."""
    neighbours = itertools.chain.from_iterable(map(itertools.pairwise, groups.values()))
    return [edge for before, after in neighbours for edge in itertools.product(before, after)]


def _cycle(f: ir.Func, pairs: Sequence[Pair]) -> set[ir.Op]:
    """Ops that wait for each other if pairs are one and meshes keep their order; none if all is well.

    A pair stands for itself by its first: it needs what one of the two needs, and who needs one needs it.
    """
    dependencies = Dependencies(f, _in_order(_groups(f, pairs)))
    place, needs = dependencies.place, dependencies.needs
    first = {place[b]: place[a] for a, b in pairs}
    for second, of in first.items():
        needs[of] |= needs[second]
    for i, needed in enumerate(needs):
        needs[i] = {first[i]} if i in first else {first.get(j, j) for j in needed}
    return set(dependencies.stable_order()[1])


def _merged(first: ir.Fragment, second: ir.Fragment) -> ir.Fragment:
    """One fragment in the place of the first, with the second's microbatch; ops may be out of order."""
    microbatch = second.call_counter
    ir.move_after(second, first)
    merged = merge(first, second)
    merged.call_counter = microbatch
    return merged

"""Which values each pass over a row computes, and which it keeps for later passes.

A row plan reads its row once per stage.  An expensive value that two passes need is written to a scratch row
by the first and read by the second; a cheap one is computed again, which usually means one more load from
L1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.kernels.kernel_plan import (
    ELEMENT,
    ROW,
    Apply,
    KernelPlan,
    ReduceNode,
    Store,
    arguments,
    store_arguments,
    store_level,
)
from mpmd.compile.kernels.operations import OPERATIONS

# A scratch row beyond this many bytes would not stay in L2.
_MAX_SCRATCH_BYTES = 256 << 10


@dataclass(frozen=True)
class RowPass:
    """One pass over a row.

    Attributes:
        row_sums: row reductions that are complete after it.
        column_sums: column reductions of elements that it adds to.
        stores: element stores that it does.
        keeps: elements that it writes to the scratch.
        reads: elements that it reads from the scratch.
    """

    row_sums: tuple[int, ...]
    column_sums: tuple[int, ...]
    stores: tuple[Store, ...]
    keeps: tuple[int, ...]
    reads: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.row_sums or self.column_sums or self.stores)


def plan_passes(plan: KernelPlan) -> list[RowPass]:
    """The passes over a row, in order."""
    count = max(plan.stages, default=0) + 1
    row_sums: list[list[int]] = [[] for _ in range(count)]
    column_sums: list[list[int]] = [[] for _ in range(count)]
    stores: list[list[Store]] = [[] for _ in range(count)]
    for number, node in enumerate(plan.nodes):
        if isinstance(node, ReduceNode) and node.axis == ROW:
            row_sums[plan.stages[node.arg]].append(number)
        elif isinstance(node, ReduceNode) and plan.levels[node.arg] == ELEMENT:
            column_sums[plan.stages[node.arg]].append(number)
    for store in plan.stores:
        if store_level(plan, store) == ELEMENT:
            stores[max(plan.stages[n] for n in store_arguments(store))].append(store)
    kept_by: dict[int, int] = {}  # node → the pass that computes it
    keeps: list[set[int]] = [set() for _ in range(count)]
    reads: list[set[int]] = [set() for _ in range(count)]
    seen: list[set[int]] = []
    for stage in range(count):
        roots = [_reduced(plan, n) for n in (*row_sums[stage], *column_sums[stage])]
        roots += [n for s in stores[stage] for n in store_arguments(s)]
        needed: set[int] = set()
        for root in roots:
            _visit(plan, root, seen, needed, kept_by, reads[stage])
        for number in sorted(reads[stage]):
            keeps[kept_by[number]].add(number)
        seen.append(needed)
    return [
        RowPass(
            tuple(row_sums[s]),
            tuple(column_sums[s]),
            tuple(stores[s]),
            tuple(sorted(keeps[s])),
            tuple(sorted(reads[s])),
        )
        for s in range(count)
    ]


def _reduced(plan: KernelPlan, number: int) -> int:
    node = plan.nodes[number]
    assert isinstance(node, ReduceNode)
    return node.arg


def _visit(
    plan: KernelPlan,
    number: int,
    seen: list[set[int]],
    needed: set[int],
    kept_by: dict[int, int],
    reads: set[int],
) -> None:
    """Note what computing a node in the current pass needs, stopping at what an earlier pass can keep."""
    if number in needed or number in reads or plan.levels[number] != ELEMENT:
        return
    first = next((s for s, nodes in enumerate(seen) if number in nodes), None)
    node = plan.nodes[number]
    if first is not None and isinstance(node, Apply) and _worth_keeping(plan, node):
        kept_by.setdefault(number, first)
        reads.add(number)
        return
    needed.add(number)
    for argument in arguments(node):
        if not isinstance(plan.nodes[argument], ReduceNode):
            _visit(plan, argument, seen, needed, kept_by, reads)


def _worth_keeping(plan: KernelPlan, node: Apply) -> bool:
    row_bytes = 4 * plan.row_size
    return OPERATIONS[node.op].is_expensive and row_bytes <= _MAX_SCRATCH_BYTES

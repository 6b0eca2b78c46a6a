"""Whether a result may be written over an operand: the query of buffer assignment for each kernel."""

from __future__ import annotations

from mpmd.compile.kernels.kernel_plan import (
    BATCH,
    COLUMN,
    ELEMENT,
    ROW,
    KernelPlan,
    Load,
    ReduceNode,
    Store,
    arguments,
    store_arguments,
    store_level,
)


def may_share(
    plan: KernelPlan, source: int, result: int, *, row: bool = False, stores_last: bool = False
) -> bool:
    """Whether a result may use the memory of an operand without later readers.

    True if every element of the operand is read before its place is written: the result is written where the
    operand is read, by the same point and by no other one, and no later pass over the row reads the operand
    again.

    Args:
        plan: the kernel.
        source: number of the operand that is read.
        result: number of the operand that is written.
        row: both hold one row, which is dead when the next one begins.
        stores_last: kernels compute all finished values of a place before they store the first.
    """
    if source == result or plan.operands[source].bytes != plan.operands[result].bytes:
        return source == result
    if source in plan.results:
        return False
    stores = [s for s in plan.stores if s.operand == result]
    loads = [(k, n) for k, n in enumerate(plan.nodes) if isinstance(n, Load) and n.operand == source]
    if not loads or not stores:
        return False
    place = stores[0].index
    if plan.operands[source].dtype != plan.operands[result].dtype:
        return False
    if any(s.index != place or s.combine or s.where >= 0 or place.values() for s in stores):
        return False
    if any(node.index != place for _, node in loads):
        return False
    if any(store_level(plan, s) != ELEMENT for s in stores) and plan.row_dims:
        return _only_finishes(plan, [k for k, _ in loads], stores, stores_last)
    if any(e > 1 and d not in place.dims() for d, e in enumerate(plan.extents) if not row or d in plan.row):
        return False  # written once more, by a point that reads it then
    written_in = min(max(plan.stages[n] for n in store_arguments(s)) for s in stores)
    last = _last_passes(plan)
    return all(last[number] <= written_in for number, _ in loads)


def _only_finishes(plan: KernelPlan, loads: list[int], stores: list[Store], stores_last: bool) -> bool:
    """Whether loads are used for nothing that happens after one store of a finished column or batch value.

    Such a store happens after all outer iterations, each place by itself.  Where all values of a place come
    before its first store, other stores may use the loads, too, and so may the outer iterations, if they are
    those of one program that stores the place.
    """
    if len(stores) != 1 or store_level(plan, stores[0]) not in (COLUMN, BATCH):
        return False
    final, place = store_level(plan, stores[0]), stores[0].index
    if any(plan.extents[d] > 1 and d not in place.dims() for d in range(plan.batch_dims)):
        return False
    iterated = stores_last and final == COLUMN
    reached = set(loads)
    for number, node in enumerate(plan.nodes):
        if reached & set(arguments(node)):
            if isinstance(node, ReduceNode) and not iterated:
                return False
            if not isinstance(node, ReduceNode) or node.axis != COLUMN:
                reached.add(number)
    inner = (ELEMENT, ROW) if iterated else ()
    others = [s for s in plan.stores if s is not stores[0] and reached & set(store_arguments(s))]
    return all(
        store_level(plan, s) in inner or (stores_last and (store_level(plan, s), s.index) == (final, place))
        for s in others
    )


def _last_passes(plan: KernelPlan) -> list[int]:
    """For each node the last pass over a row that may compute it again."""
    last = list(plan.stages)
    for store in plan.stores:
        needed = store_arguments(store)
        written_in = max(plan.stages[n] for n in needed)
        for number in needed:
            last[number] = max(last[number], written_in)
    for user in reversed(range(len(plan.nodes))):  # users come after their operands
        node = plan.nodes[user]
        for number in arguments(node):
            # a reduction reads its argument in the argument's own pass
            read_in = plan.stages[number] if isinstance(node, ReduceNode) else last[user]
            last[number] = max(last[number], read_in)
    return last

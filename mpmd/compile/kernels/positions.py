"""Comparisons of a position with a bound that only its outer dims can reach.

    d2 * 768 + d3 < 1536, d3 below 768  ->  d2 < 2

A concatenation makes this comparison at every point to select its operand.  Without the inner dims the
result is the same for a whole row, and is computed once.
"""

from __future__ import annotations

from mpmd.compile.kernels.builder import PlanBuilder, renumbered
from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.plan import Apply, Constant, IndexValue, KernelPlan, store_arguments

_BELOW = {"compare-lt": ("compare-lt", 0), "compare-ge": ("compare-ge", 0),
          "compare-le": ("compare-lt", 1), "compare-gt": ("compare-ge", 1)}  # fmt: skip
"""Each comparison as `<` or `>=`, and its offset of the bound."""
_SIGNED = ("s32", "s64")


def with_coarse_comparisons(plan: KernelPlan) -> KernelPlan:
    """The plan with fewer dims in its comparisons of positions."""
    found = {k: c for k, n in enumerate(plan.nodes) if isinstance(n, Apply) and (c := _coarse(plan, n))}
    if not found:
        return plan
    build = PlanBuilder(plan.name, plan.extents, batch_dims=plan.batch_dims, row_dims=plan.row_dims)
    for operand in plan.operands:
        build.operand(operand.name, operand.dtype, operand.size)
    numbers: dict[int, int] = {}
    for number, node in enumerate(plan.nodes):
        if number in found:
            op, index, bound, dtype = found[number]
            numbers[number] = build.apply(op, build.index(index, dtype), build.constant(bound, dtype))
        else:
            numbers[number] = build.node(renumbered(node, numbers))
    for store in plan.stores:
        used = {k: numbers[k] for k in store_arguments(store)}
        where = used[store.where] if store.where >= 0 else -1
        place = store.index.renumber(used)
        build.store(store.operand, place, used[store.node], combine=store.combine, where=where)
    return build.finish()


def _coarse(plan: KernelPlan, node: Apply) -> tuple[str, Index, int, str] | None:
    """Comparison, index, bound and dtype of an equivalent comparison with fewer dims, if there is one."""
    if node.op not in _BELOW:
        return None
    place, limit = (plan.nodes[a] for a in node.args)
    if not isinstance(place, IndexValue) or not isinstance(limit, Constant) or place.dtype not in _SIGNED:
        return None
    if place.index.values():
        return None
    op, more = _BELOW[node.op]
    bound = int(limit.value) + more
    for step in sorted({abs(factor) for _, factor in place.index.terms}, reverse=True):
        if step < 2 or bound % step:
            continue
        index = place.index.divided(step, plan.extents)
        if index.dims() < place.index.dims() and all(atom.kind == "dim" for atom, _ in index.terms):
            return op, index, bound // step, place.dtype
    return None

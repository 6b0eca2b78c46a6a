"""Normalises a plan: fewer dims, longer innermost dims, fewer quotients.

* dims of extent 1 are removed;
* a dim that is divided somewhere is split there;
* the dims of a kernel without reductions are put in the order of its first result in memory;
* neighbours that always move together merge.

Printers get plans in this form, so an elementwise kernel of any rank is one flat loop wherever its arrays
allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpmd.compile.kernels.index import Atom, Index, constant, dim
from mpmd.compile.kernels.kernel_plan import IndexValue, KernelPlan, Load, Node, Store


def normalise(plan: KernelPlan) -> KernelPlan:
    plan = drop_single_dims(plan)
    while (finer := _split_once(plan)) is not plan:
        plan = finer
    plan = order_dims(drop_single_dims(plan))
    while (merged := _merge_once(plan)) is not plan:
        plan = merged
    return plan


def drop_single_dims(plan: KernelPlan) -> KernelPlan:
    """Without dims of extent 1."""
    kept = [d for d, e in enumerate(plan.extents) if e != 1]
    if len(kept) == plan.rank:
        return plan
    dims = {d: constant(0) for d in range(plan.rank)}
    dims.update({old: dim(new) for new, old in enumerate(kept)})
    return _with_dims(
        plan,
        [plan.extents[d] for d in kept],
        sum(d < plan.batch_dims for d in kept),
        sum(d in plan.row for d in kept),
        dims,
    )


def _split_once(plan: KernelPlan) -> KernelPlan:
    """Split the first dim that is divided or taken modulo a divisor of its extent."""
    for index in _indices(plan):
        for atom in _quotients(index):
            assert atom.inner is not None
            if len(atom.inner.terms) != 1 or atom.inner.constant:
                continue
            (inner, factor), divisor = atom.inner.terms[0], atom.number
            if inner.kind != "dim" or factor != 1:
                continue
            extent = plan.extents[inner.number]
            if 1 < divisor < extent and extent % divisor == 0:
                return split(plan, inner.number, divisor)
    return plan


def split(plan: KernelPlan, at: int, low: int) -> KernelPlan:
    """One dim as two, the second of extent `low`, which divides its extent."""
    extents = [*plan.extents[:at], plan.extents[at] // low, low, *plan.extents[at + 1 :]]
    dims = {d: dim(d if d < at else d + 1) for d in range(plan.rank)}
    dims[at] = dim(at) * low + dim(at + 1)
    batch = plan.batch_dims + (at < plan.batch_dims)
    return _with_dims(plan, extents, batch, plan.row_dims + (at in plan.row), dims)


def order_dims(plan: KernelPlan) -> KernelPlan:
    """Without reductions: the dims ordered by the strides of the first result."""
    if plan.kind != "loop" or not plan.stores or any(s.index.values() or s.combine for s in plan.stores):
        return plan
    place = plan.stores[0].index
    order = sorted(range(plan.rank), key=lambda d: -abs(place.factor(d)))
    if order == list(range(plan.rank)) or not all(place.is_linear_in(d) for d in order):
        return plan
    return reordered(plan, order)


def reordered(plan: KernelPlan, order: Sequence[int]) -> KernelPlan:
    """Without reductions: with the dims in another order."""
    dims = {old: dim(new) for new, old in enumerate(order)}
    return _with_dims(plan, [plan.extents[d] for d in order], 0, 0, dims)


def _merge_once(plan: KernelPlan) -> KernelPlan:
    """Merge the last pair of neighbours in one group that every index traverses as one."""
    for at in reversed(range(plan.rank - 1)):
        same_group = any(at in g and at + 1 in g for g in (range(plan.batch_dims), plan.outer, plan.row))
        if same_group and all(_moves_together(i, at, plan.extents[at + 1]) for i in _indices(plan)):
            extents = list(plan.extents)
            extents[at : at + 2] = [extents[at] * extents[at + 1]]
            # the first dim's terms vanish: its factor is the second's times the second's extent
            dims = {d: dim(d if d <= at else d - 1) for d in range(plan.rank)}
            dims[at] = constant(0)
            dims[at + 1] = dim(at)
            batch = plan.batch_dims - (at + 1 < plan.batch_dims)
            return _with_dims(plan, extents, batch, plan.row_dims - (at in plan.row), dims)
    return plan


def _moves_together(index: Index, at: int, extent: int) -> bool:
    linear = index.is_linear_in(at) and index.is_linear_in(at + 1)
    return linear and index.factor(at) == index.factor(at + 1) * extent


def _indices(plan: KernelPlan) -> list[Index]:
    nodes = [n.index for n in plan.nodes if isinstance(n, Load | IndexValue)]
    return nodes + [s.index for s in plan.stores]


def _quotients(index: Index) -> list[Atom]:
    quotients: list[Atom] = []
    for atom, _ in index.terms:
        if atom.inner is not None:
            quotients += _quotients(atom.inner)
            quotients.append(atom)
    return quotients


def _with_dims(
    plan: KernelPlan, extents: Sequence[int], batch_dims: int, row_dims: int, dims: Mapping[int, Index]
) -> KernelPlan:
    def moved(index: Index) -> Index:
        return index.substitute(dims, extents)

    def node(old: Node) -> Node:
        return replace(old, index=moved(old.index)) if isinstance(old, Load | IndexValue) else old

    def store(old: Store) -> Store:
        return replace(old, index=moved(old.index))

    return KernelPlan(
        plan.name,
        tuple(extents),
        batch_dims,
        row_dims,
        plan.operands,
        tuple(node(n) for n in plan.nodes),
        tuple(store(s) for s in plan.stores),
    )

"""Products with few rows for each of many batch indices, as products with many rows.

    8 x 4096 times [4, 128] · [128, 4096]   ->   8 x 4 times [4096, 128] · [128, 4096]

Heads that share their keys are such products: the rows of their scores are the queries and the heads of a
group, which are not one dim in memory.  A tile of sums has 16 rows at least, and reads a whole right factor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd.compile.backends.native_gpu.triton.matrices import MIN_SIDE
from mpmd.compile.kernels.index import dim, linear, strides_of
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.matmul import MatmulPlan, View
from mpmd.compile.kernels.nodes import IndexValue, Load


def with_long_rows(plan: MatmulPlan) -> MatmulPlan:
    """The product with other rows if it has too few: the longest batch dim that its right factor lacks."""
    shared = [d for d, step in enumerate(plan.b.batch) if not step]
    longest = max(shared, key=lambda d: plan.batch[d], default=-1)
    if plan.m >= MIN_SIDE or longest < 0 or plan.batch[longest] <= plan.m:
        return plan

    def turned(view: View) -> View:
        return dataclasses.replace(
            view, row=view.batch[longest], batch=_replaced(view.batch, longest, view.row)
        )

    return dataclasses.replace(
        plan,
        batch=_replaced(plan.batch, longest, plan.m),
        m=plan.batch[longest],
        a=turned(plan.a),
        b=dataclasses.replace(plan.b, batch=_replaced(plan.b.batch, longest, 0)),
        c=turned(plan.c),
        epilogue=None if plan.epilogue is None else _with_dims_exchanged(plan.epilogue, longest, plan.sums),
    )


def _replaced(numbers: Sequence[int], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])


def _with_dims_exchanged(plan: KernelPlan, one: int, sums: int) -> KernelPlan:
    """An epilogue with a batch dim and the rows in each other's place; its sums stay dense."""
    other = plan.rank - 2
    extents = _replaced(_replaced(plan.extents, one, plan.extents[other]), other, plan.extents[one])
    moved = {one: dim(other), other: dim(one)}
    dense = linear([dim(d) for d in range(plan.rank)], strides_of(extents))
    nodes = []
    for node in plan.nodes:
        if isinstance(node, Load | IndexValue):
            index = node.index.substitute(moved, extents)
            node = dataclasses.replace(node, index=index)
        if isinstance(node, Load) and node.operand == sums:
            node = dataclasses.replace(node, index=dense)
        nodes.append(node)
    stores = [dataclasses.replace(s, index=s.index.substitute(moved, extents)) for s in plan.stores]
    return dataclasses.replace(plan, extents=extents, nodes=tuple(nodes), stores=tuple(stores))

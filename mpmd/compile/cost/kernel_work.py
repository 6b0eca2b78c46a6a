"""The work of a kernel, independent of the device: bytes, operations, parallel parts.

Of a plan, of a product with its epilogue, and of attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from mpmd.compile.kernels.kernel_plan import (
    BATCH,
    COLUMN,
    ELEMENT,
    Apply,
    KernelPlan,
    Load,
    ReduceNode,
    Store,
    store_level,
)
from mpmd.compile.kernels.operations import DTYPE_BYTES, OPERATIONS
from mpmd.compile.kernels.product_plans import KEYS, AttentionPlan, MatmulPlan, View
from mpmd.cost.roofline import KernelWorkload

_MIN_PART = 2048
"""Points of the smallest part of a kernel that is worth a processor of its own."""

_MAX_LINE_BYTES = 64
"""Elements so far apart share a line on no device."""


def plan_workload(plan: KernelPlan, virtual: Collection[int] = ()) -> KernelWorkload:
    """The work of a plan.

    Args:
        plan: the plan.
        virtual: numbers of operands that are not in memory: sums that a product passes to its epilogue.
    """
    points = [_points(plan, k) for k in range(len(plan.nodes))]
    users: list[list[int]] = [[] for _ in plan.nodes]
    for number, used in enumerate(plan.uses):
        for a in dict.fromkeys(used):
            users[a].append(number)
    flops = vector_bytes = read = again = scattered = 0.0
    scattered_elements = rows = 0.0
    for number, node in enumerate(plan.nodes):
        if isinstance(node, Load):
            if node.operand in virtual:
                continue
            loads = points[number] * _passes(plan, number, users[number])
            size = DTYPE_BYTES[node.dtype]
            first = min(plan.operands[node.operand].size, _touched(plan, node))
            read += first * size
            again += max(0, loads - first) * size
            if _is_scattered(plan, node):
                scattered += loads * size
                scattered_elements += loads
        elif isinstance(node, Apply):
            cost = OPERATIONS[node.op].cycles
            width = max(4, DTYPE_BYTES[plan.nodes[node.args[-1]].dtype])
            vector_bytes += points[number] * width * cost
            flops += points[number]
        elif isinstance(node, ReduceNode):
            inner = _points(plan, node.arg, whole=True)
            vector_bytes += inner * max(4, DTYPE_BYTES[node.dtype])
            flops += inner
            rows += points[number] if node.axis == "row" else 0
    stores = [s for s in plan.stores if s.operand not in virtual]
    written = sum(_stored(plan, s) * DTYPE_BYTES[plan.operands[s.operand].dtype] for s in stores)
    parts = math.prod(plan.extents[: plan.rank - max(1, plan.row_dims)]) or 1
    if plan.kind in ("loop", "column"):
        parts = max(1, plan.size // _MIN_PART)
    return KernelWorkload(
        kind=plan.kind,
        flops=flops,
        vector_bytes=vector_bytes,
        read_bytes=read,
        again_bytes=again,
        written_bytes=float(written),
        parts=max(1, parts),
        scattered_bytes=scattered,
        scattered_elements=scattered_elements,
        rows=int(rows),
        live_values=_live_values(plan),
    )


def _points(plan: KernelPlan, number: int, *, whole: bool = False) -> int:
    """How often a node is computed; with `whole`, how often its value is consumed by a reduction."""
    level = plan.levels[number]
    dims = set(range(plan.batch_dims))
    if level in (ELEMENT, "row"):
        dims |= set(plan.outer)
    if level in (ELEMENT, COLUMN) or plan.row_dims == 0 or whole:
        dims |= set(plan.row)
    if plan.row_dims == 0 and level != BATCH:
        dims = set(range(max(plan.depends[number], default=-1) + 1))  # where all inputs are
    return math.prod([plan.extents[d] for d in sorted(dims)])


def _touched(plan: KernelPlan, node: Load) -> int:
    """Upper bound of the different elements that a load reads."""
    dims = set(node.index.dims())
    for value in node.index.values():
        dims |= plan.depends[value]
    return math.prod([plan.extents[d] for d in sorted(dims)])


def _stored(plan: KernelPlan, store: Store) -> int:
    level = store_level(plan, store)
    dims = set(range(plan.batch_dims))
    if level in (ELEMENT, "row"):
        dims |= set(plan.outer)
    if level in (ELEMENT, COLUMN):
        dims |= set(plan.row)
    return math.prod([plan.extents[d] for d in sorted(dims)])


def _is_scattered(plan: KernelPlan, node: Load) -> bool:
    """Whether neighbouring points of the last dim read from different lines."""
    if not plan.rank:
        return False
    last = plan.rank - 1
    if any(last in plan.depends[v] for v in node.index.values()) or not node.index.is_linear_in(last):
        return True
    size = DTYPE_BYTES[node.dtype]
    return abs(node.index.factor(last)) * size >= _MAX_LINE_BYTES and plan.extents[last] > 1


def _passes(plan: KernelPlan, number: int, users: Sequence[int]) -> int:
    """The number of passes over a row that need a load, if nothing is kept between them."""
    stages = {plan.stages[number]} | {
        plan.stages[u] for u in users if not isinstance(plan.nodes[u], ReduceNode)
    }
    return len(stages)


def _live_values(plan: KernelPlan) -> int:
    """Maximum of values of one point that are live at the same time, in the order of the nodes."""
    last_use = {a: k for k, used in enumerate(plan.uses) for a in used}
    for store in plan.stores:
        last_use[store.node] = len(plan.nodes)
    alive = most = 0
    ends: dict[int, int] = {}
    for number in range(len(plan.nodes)):
        alive += 1
        end = last_use.get(number, number)
        ends[end] = ends.get(end, 0) + 1
        most = max(most, alive)
        alive -= ends.pop(number, 0)
    return most


_MIN_ROWS, _MIN_COLUMNS = 512, 32
"""The smallest part of a product that is worth a processor of its own."""

_MIN_QUERIES = 64
"""The same for attention."""


def product_workloads(plan: MatmulPlan) -> list[KernelWorkload]:
    batch = plan.batch
    read = _bytes(plan.a, batch, plan.m, plan.k) + _bytes(plan.b, batch, plan.k, plan.n)
    written = _bytes(plan.c, batch, plan.m, plan.n) if plan.epilogue is None else 0.0
    parts = math.prod(batch) * -(-plan.n // _MIN_COLUMNS) * -(-plan.m // _MIN_ROWS)
    product = _product(plan.flops, plan.a.dtype, read, written, parts)
    if plan.epilogue is None:
        return [product]
    return [product, plan_workload(plan.epilogue, {plan.sums})]


def attention_workloads(plan: AttentionPlan) -> list[KernelWorkload]:
    """The work of the products of an attention kernel, and of its rows; scores stay in the cache."""
    batch, queries, keys = plan.batch, plan.queries, plan.keys
    read = written = 0.0
    for score in plan.scores:
        read += _bytes(score.a, batch, queries, score.depth) + _bytes(score.b, batch, score.depth, keys)
    for mixture in plan.mixtures:
        summed, kept = (keys, queries) if mixture.over == KEYS else (queries, keys)
        read += _bytes(mixture.w, batch, summed, mixture.width)
        written += _bytes(mixture.c, batch, kept, mixture.width)
    share = plan.share
    dtype = plan.scores[0].a.dtype
    parts = math.prod(batch) * -(-queries // _MIN_QUERIES)
    rows = plan_workload(plan.rows, plan.inner)
    return [_product(plan.flops * share, dtype, read, written, parts), _scaled(rows, share)]


def _product(flops: float, dtype: str, read: float, written: float, parts: int) -> KernelWorkload:
    return KernelWorkload(
        kind="matmul",
        flops=float(flops),
        vector_bytes=0.0,
        read_bytes=read,
        again_bytes=0.0,
        written_bytes=written,
        parts=max(1, parts),
        matmul_dtype=dtype,
    )


def _bytes(view: View, batch: Sequence[int], rows: int, columns: int) -> float:
    """Bytes of the different elements of a matrix, or of one per batch index."""
    sizes = (*batch, rows, columns)
    strides = (*view.batch, view.row, view.column)
    count = math.prod([size for size, stride in zip(sizes, strides, strict=True) if stride])
    return float(count * DTYPE_BYTES[view.dtype])


def _scaled(work: KernelWorkload, share: float) -> KernelWorkload:
    """Rows of which only a share is computed; their operands and results are in memory whole."""
    return dataclasses.replace(
        work,
        flops=work.flops * share,
        vector_bytes=work.vector_bytes * share,
        again_bytes=work.again_bytes * share,
        rows=int(work.rows * share),
    )

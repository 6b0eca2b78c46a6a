"""The work of products: of one with its epilogue, and of attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mpmd.compile.kernels.attention import KEYS, AttentionPlan
from mpmd.compile.kernels.cost.workload import KernelWorkload, plan_workload
from mpmd.compile.kernels.matmul import MatmulPlan, View
from mpmd.compile.kernels.operations import DTYPE_BYTES

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

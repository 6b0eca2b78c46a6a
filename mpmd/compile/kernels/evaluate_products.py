"""The meaning of products and of attention, by NumPy: slow, obvious, with all scores in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpmd.compile.kernels.attention import QUERIES, AttentionPlan
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.matmul import MatmulPlan, View
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan import KernelPlan

Array = Any


def evaluate_product(
    plan: MatmulPlan, a: np.ndarray, b: np.ndarray, arrays: Mapping[int, np.ndarray]
) -> None:
    """Run a matrix product; sums of floats are exact to f64 and rounded once.

    Args:
        plan: what to compute.
        a: the array of the first factor.
        b: the array of the second.
        arrays: of the epilogue's operands but the sums, by number; without an epilogue 0 is the result.
    """
    left = _matrix(a, plan.a, plan.batch, plan.m, plan.k)
    right = _matrix(b, plan.b, plan.batch, plan.k, plan.n)
    if plan.epilogue is None:
        _write_matrix(arrays[0], plan.c, plan.batch, _product(left, right))
        return
    sums = _product(left, right).astype(NUMPY_DTYPE[plan.epilogue.operands[plan.sums].dtype])
    evaluate(plan.epilogue, _operands(plan.epilogue, {**arrays, plan.sums: sums}))


def evaluate_attention(plan: AttentionPlan, arrays: Mapping[str, np.ndarray]) -> None:
    """Run an attention kernel, with all of its scores in memory.

    Args:
        plan: what to compute.
        arrays: by the names of `AttentionThunk.inputs` and `outputs`.
    """
    rows, batch = plan.rows, plan.batch
    inner = {k: np.empty(rows.operands[k].size, NUMPY_DTYPE[rows.operands[k].dtype]) for k in plan.inner}
    for k, score in enumerate(plan.scores):
        left = _matrix(arrays[f"a{k}"], score.a, batch, plan.queries, score.depth)
        right = _matrix(arrays[f"b{k}"], score.b, batch, score.depth, plan.keys)
        inner[score.sums][...] = _product(left, right).reshape(-1)
    evaluate(rows, _operands(rows, {**{k: arrays[f"p{k}"] for k in plan.outer}, **inner}))
    for k, mixture in enumerate(plan.mixtures):
        factor = inner[mixture.factor].reshape(rows.extents)
        if mixture.over == QUERIES:
            factor = factor.swapaxes(-1, -2)
        right = _matrix(arrays[f"w{k}"], mixture.w, batch, factor.shape[-1], mixture.width)
        _write_matrix(arrays[f"c{k}"], mixture.c, batch, _product(factor, right))


def _product(left: Array, right: Array) -> Array:
    """The product of matrices in f64, or of integers in their own type."""
    if np.issubdtype(left.dtype, np.integer):
        return np.matmul(left, right)
    with np.errstate(all="ignore"):
        return np.matmul(left.astype(np.float64), right.astype(np.float64))


def _operands(plan: KernelPlan, arrays: Mapping[int, np.ndarray]) -> list[Array]:
    return [arrays[k] for k in range(len(plan.operands))]


def _positions(view: View, batch: Sequence[int], rows: int, columns: int) -> Array:
    """Where the elements of a matrix are, or of one per batch index."""
    sizes, strides = (*batch, rows, columns), (*view.batch, view.row, view.column)
    steps = [np.arange(n) * stride for n, stride in zip(sizes, strides, strict=True)]
    return view.offset + sum(np.ix_(*steps))


def _matrix(array: np.ndarray, view: View, batch: Sequence[int], rows: int, columns: int) -> Array:
    return array.reshape(-1)[_positions(view, batch, rows, columns)]


def _write_matrix(array: np.ndarray, view: View, batch: Sequence[int], values: Array) -> None:
    target = array.reshape(-1)
    target[_positions(view, batch, *values.shape[-2:])] = values.astype(target.dtype)

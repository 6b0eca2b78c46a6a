"""The semantics of products and of attention, by NumPy: slow and simple, with all scores in memory.

Rows that may skip keys are computed a second time without them, and must then have the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpmd.compile.kernels.evaluate import Evaluation, evaluate, write
from mpmd.compile.kernels.kernel_plan import ROW, KernelPlan, ReduceNode
from mpmd.compile.kernels.masking import Triangle
from mpmd.compile.kernels.operations import NUMPY_DTYPE, REDUCTIONS
from mpmd.compile.kernels.product_plans import QUERIES, AttentionPlan, MatmulPlan, View
from mpmd.errors import CompileError

Array = Any


def evaluate_product(
    plan: MatmulPlan, a: np.ndarray, b: np.ndarray, arrays: Mapping[int, np.ndarray]
) -> None:
    """Run a matrix product; sums of floats are exact to f64 and rounded once.

    Args:
        plan: the plan to compute.
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
        plan: the plan to compute.
        arrays: by the names of `AttentionThunk.inputs` and `outputs`.

    Raises:
        CompileError: what the plan says can be skipped changes a result.
    """
    rows, batch = plan.rows, plan.batch
    inner = {k: np.empty(rows.operands[k].size, NUMPY_DTYPE[rows.operands[k].dtype]) for k in plan.inner}
    for k, score in enumerate(plan.scores):
        left = _matrix(arrays[f"a{k}"], score.a, batch, plan.queries, score.depth)
        right = _matrix(arrays[f"b{k}"], score.b, batch, score.depth, plan.keys)
        inner[score.sums][...] = _product(left, right).reshape(-1)
    evaluation = Evaluation(rows, _operands(rows, {**{k: arrays[f"p{k}"] for k in plan.outer}, **inner}))
    evaluation.compute()
    if plan.triangle is not None:
        _compare_skipping(evaluation, plan.triangle)
    write(rows, evaluation.operands, evaluation.stores())
    for k, mixture in enumerate(plan.mixtures):
        factor = inner[mixture.factor].reshape(rows.extents)
        if mixture.over == QUERIES:
            factor = factor.swapaxes(-1, -2)
        right = _matrix(arrays[f"w{k}"], mixture.w, batch, factor.shape[-1], mixture.width)
        _write_matrix(arrays[f"c{k}"], mixture.c, batch, _product(factor, right))


class _Skipping(Evaluation):
    """Rows whose reductions leave out the keys beyond the triangle."""

    def __init__(self, whole: Evaluation, triangle: Triangle) -> None:
        super().__init__(whole.plan, whole.operands)
        rank, (queries, keys) = whole.plan.rank, whole.plan.extents[-2:]
        seen = np.arange(keys) <= np.arange(queries)[:, None] + triangle.offset
        self.seen = seen.reshape((1,) * (rank - 2) + seen.shape)

    def reduced(self, node: ReduceNode) -> Array:
        """The value of a reduction over the keys that are seen."""
        if node.axis == ROW:
            value = self.values[node.arg]
            identity = np.asarray(REDUCTIONS[node.op].identity(node.dtype)).astype(value.dtype)
            self.values[node.arg], whole = np.where(self.seen, value, identity), value
            result = super().reduced(node)
            self.values[node.arg] = whole
            return result
        return super().reduced(node)


def _compare_skipping(whole: Evaluation, triangle: Triangle) -> None:
    """Computes rows that meet all guards without the keys beyond the triangle.

    Raises:
        CompileError: a reduction of such a row, or a value stored beyond the triangle, is another one.
    """
    plan, part = whole.plan, _Skipping(whole, triangle)
    part.compute()
    skips = np.ones((1,) * plan.rank, bool)
    for guard in triangle.guards:
        value = part.values[guard.value].astype(np.float64)
        skips = skips & (guard.filler + (value if guard.negated else -value) < guard.bound)
    reductions = [k for k, n in enumerate(plan.nodes) if isinstance(n, ReduceNode) and n.axis == ROW]
    for number in reductions:
        _compare(whole, triangle, number, part.values[number], skips)
    for number, fill in triangle.fills.items():
        _compare(whole, triangle, plan.stores[number].node, np.float64(fill), skips & ~part.seen)


def _compare(whole: Evaluation, triangle: Triangle, number: int, skipping: Array, where: Array) -> None:
    """Compares a value, except for the rounding of sums; masked values that are not finite count as zero."""
    plan, wanted, scale = whole.plan, whole.values[number].astype(np.float64), 0.0
    node = plan.nodes[number]
    if isinstance(node, ReduceNode) and node.op == "add":
        scale = np.abs(whole.values[node.arg].astype(np.float64)).sum(axis=-1, keepdims=True)
    tolerance = 2.0**-8 if node.dtype == "bf16" else 2.0**-20
    with np.errstate(all="ignore"):
        differs = ~(np.abs(skipping - wanted) <= tolerance * scale) & (skipping != wanted)
        differs = differs & where & np.isfinite(wanted)
    if differs.any():
        first = tuple(np.argwhere(differs)[0])
        before, after = (np.broadcast_to(v, differs.shape)[first] for v in (wanted, skipping))
        raise CompileError(
            f"kernel {plan.name} sees {triangle} only, so that %{number} changes from {before} to {after}"
        )


def _product(left: Array, right: Array) -> Array:
    """The product of matrices in f64, or of integers in their own type."""
    if np.issubdtype(left.dtype, np.integer):
        return np.matmul(left, right)
    with np.errstate(all="ignore"):
        return np.matmul(left.astype(np.float64), right.astype(np.float64))


def _operands(plan: KernelPlan, arrays: Mapping[int, np.ndarray]) -> list[Array]:
    return [arrays[k] for k in range(len(plan.operands))]


def _positions(view: View, batch: Sequence[int], rows: int, columns: int) -> Array:
    """The elements of a matrix in memory, or of one per batch index."""
    sizes, strides = (*batch, rows, columns), (*view.batch, view.row, view.column)
    steps = [np.arange(n) * stride for n, stride in zip(sizes, strides, strict=True)]
    return view.offset + sum(np.ix_(*steps))


def _matrix(array: np.ndarray, view: View, batch: Sequence[int], rows: int, columns: int) -> Array:
    return array.reshape(-1)[_positions(view, batch, rows, columns)]


def _write_matrix(array: np.ndarray, view: View, batch: Sequence[int], values: Array) -> None:
    target = array.reshape(-1)
    target[_positions(view, batch, *values.shape[-2:])] = values.astype(target.dtype)

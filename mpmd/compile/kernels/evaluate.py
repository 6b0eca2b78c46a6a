"""The semantics of plans, by NumPy over the whole space: slow and simple, the reference for printers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpmd.compile.hlo.dtypes import dtype_of
from mpmd.compile.hlo.evaluator.conversion import convert
from mpmd.compile.hlo.evaluator.elementwise import COMPARE, compute
from mpmd.compile.hlo.evaluator.values import widen
from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.operations import NUMPY_DTYPE, REDUCTIONS
from mpmd.compile.kernels.plan import (
    COLUMN,
    ELEMENT,
    ROW,
    Apply,
    Constant,
    IndexValue,
    KernelPlan,
    Load,
    Node,
    ReduceNode,
    Store,
    store_level,
)

Array = Any


def evaluate(plan: KernelPlan, arrays: Sequence[np.ndarray], most: int = 1 << 24) -> None:
    """Run a plan.

    A large space is computed in slices of its outermost dim, unless something is added up along it: that of
    a running sum of n elements has n x n.

    Args:
        plan: the plan to compute.
        arrays: a contiguous array for each operand; results are written into theirs.
        most: elements of the space whose values are computed at once.
    """
    flat = [a.reshape(-1) for a in arrays]
    extent, each = (plan.extents[0], math.prod(plan.extents[1:])) if plan.rank else (1, 1)
    whole = 0 in plan.row or extent * each <= most or _adds_columns(plan)
    step = extent if whole else max(most // each, 1)
    starts = [0] if whole else range(0, extent, step)
    with np.errstate(all="ignore"):
        slices = [_Evaluator(plan, flat, first, min(step, extent - first)) for first in starts]
        stores = [store for part in slices for store in part.run()]
    for store, position, value in stores:
        target = flat[store.operand]
        if store.combine:
            REDUCTIONS[store.combine].meaning.at(target, position, value)
        else:
            target[position] = value


def _adds_columns(plan: KernelPlan) -> bool:
    return any(isinstance(node, ReduceNode) and node.axis != ROW for node in plan.nodes)


class _Evaluator:
    """Values are arrays of the plan's rank, with extent 1 along dims that they do not depend on.

    Attributes:
        first: where the slice begins along dim 0.
        extents: of the slice.
    """

    def __init__(self, plan: KernelPlan, operands: list[np.ndarray], first: int, count: int) -> None:
        self.plan = plan
        self.operands = operands
        self.first = first
        self.extents = (count, *plan.extents[1:]) if plan.rank else ()
        self.values: list[Array] = []

    def run(self) -> list[tuple[Store, np.ndarray, np.ndarray]]:
        """Compute all nodes; what is to be stored, and where."""
        for node in self.plan.nodes:
            self.values.append(self._value(node))
        found = [self._store(store) for store in self.plan.stores]
        self.values.clear()
        return found

    def _position(self, index: Index) -> Array:
        rank = self.plan.rank
        total = np.full((1,) * rank, index.constant, np.int64)
        for atom, factor in index.terms:
            if atom.kind == "dim":
                shape = [1] * rank
                shape[atom.number] = self.extents[atom.number]
                begin = 0 if atom.number else self.first
                part = np.arange(begin, begin + shape[atom.number], dtype=np.int64).reshape(shape)
            elif atom.inner is None:
                part = self.values[atom.number].astype(np.int64)
            else:
                inner = self._position(atom.inner)
                part = inner // atom.number if atom.kind == "div" else inner % atom.number
            total = total + part * factor
        return total

    def _value(self, node: Node) -> Array:
        dtype = NUMPY_DTYPE[node.dtype]
        if isinstance(node, Constant):
            return np.full((1,) * self.plan.rank, node.value).astype(dtype)
        if isinstance(node, IndexValue):
            return self._position(node.index).astype(dtype)
        if isinstance(node, Load):
            return self._load(node)
        if isinstance(node, ReduceNode):
            return self._reduce(node)
        return apply(node, [self.values[a] for a in node.args])

    def _load(self, node: Load) -> Array:
        source, position = self.operands[node.operand], self._position(node.index)
        if node.where < 0:
            return source[position]
        guard, position = np.broadcast_arrays(self.values[node.where], position)
        if source.size == 0:
            return np.zeros(guard.shape, source.dtype)
        return np.where(guard, source[np.where(guard, position, 0)], np.zeros((), source.dtype))

    def _reduce(self, node: ReduceNode) -> Array:
        plan, value = self.plan, self.values[node.arg]
        axes = tuple(plan.row if node.axis == ROW else plan.outer)
        shape = [self.extents[d] if d in axes else value.shape[d] for d in range(plan.rank)]
        value = np.broadcast_to(value, shape)
        reduction = REDUCTIONS[node.op]
        wide = np.float32 if node.dtype in ("bf16", "f16") else value.dtype
        identity = np.asarray(reduction.identity(node.dtype)).astype(wide)
        result = value.astype(wide)
        for axis in axes:
            result = reduction.meaning.reduce(result, axis=axis, keepdims=True, initial=identity, dtype=wide)
        return result.astype(value.dtype)

    def _store(self, store: Store) -> tuple[Store, np.ndarray, np.ndarray]:
        plan = self.plan
        level = store_level(plan, store)
        kept = set(range(plan.batch_dims))
        if level in (ELEMENT, ROW):
            kept |= set(plan.outer)
        if level in (ELEMENT, COLUMN):
            kept |= set(plan.row)
        shape = [e if d in kept else 1 for d, e in enumerate(self.extents)]
        value = np.broadcast_to(self.values[store.node], shape)
        position = np.broadcast_to(self._position(store.index), shape)
        if store.where >= 0:
            guard = np.broadcast_to(self.values[store.where], shape)
            value, position = value[guard], position[guard]
        return store, position.reshape(-1), value.reshape(-1)


def apply(node: Apply, args: Sequence[Array]) -> Array:
    """An elementwise operation on NumPy arrays of the dtypes of its operands."""
    dtype = NUMPY_DTYPE[node.dtype]
    if node.op == "convert":
        return np.asarray(convert(args[0], dtype_of(args[0]), node.dtype))
    if node.op == "bitcast-convert":
        return np.asarray(args[0], order="C").view(dtype)  # which keeps a scalar one
    given = dtype_of(args[-1])
    opcode, _, direction = node.op.partition("compare-")
    with np.errstate(all="ignore"):  # infinities and NaN are values as others are
        if direction:
            return np.asarray(COMPARE[direction.upper()](*(widen(a, given) for a in args)))
        return np.asarray(compute(opcode, args, given, node.dtype))

"""The semantics of plans, by NumPy over the whole space: slow and simple, the reference for printers.

It looks at every place: a plan that reads or writes outside of an array is refused.  Machine code takes what
lies there, and NumPy counts from the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpmd.compile.hlo.dtypes import dtype_of
from mpmd.compile.hlo.evaluator.elementwise import COMPARE, compute
from mpmd.compile.hlo.evaluator.values import convert, widen
from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.kernel_plan import (
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
from mpmd.compile.kernels.operations import NUMPY_DTYPE, REDUCTIONS
from mpmd.errors import CompileError

Array = Any
Stored = tuple[Store, Array, Array]
"""A store, its positions and their values."""
_EXTREMES = ("maximum", "minimum")


def evaluate(plan: KernelPlan, arrays: Sequence[np.ndarray], most: int = 1 << 24) -> None:
    """Run a plan.

    A large space is computed in slices of its outermost dim, unless something is added up along it: the
    space of a running sum of n elements has n x n.

    Args:
        plan: the plan to compute.
        arrays: a contiguous array for each operand; results are written into theirs.
        most: elements of the space whose values are computed at once.

    Raises:
        CompileError: it reads or writes outside of an array.
    """
    extent, each = (plan.extents[0], math.prod(plan.extents[1:])) if plan.rank else (1, 1)
    whole = 0 in plan.row or extent * each <= most or _adds_columns(plan)
    step = extent if whole else max(most // each, 1)
    stores: list[Stored] = []
    for first in [0] if whole else range(0, extent, step):
        part = Evaluation(plan, arrays, first, None if whole else min(step, extent - first))
        part.compute()
        stores += part.stores()
    write(plan, arrays, stores)  # once all is computed: a result may have the memory of an operand


def _adds_columns(plan: KernelPlan) -> bool:
    return any(isinstance(node, ReduceNode) and node.axis != ROW for node in plan.nodes)


def write(plan: KernelPlan, arrays: Sequence[np.ndarray], stores: Sequence[Stored]) -> None:
    """Write what `Evaluation.stores` gives into the arrays of a plan's operands."""
    for store, position, value in stores:
        target, op = arrays[store.operand].reshape(-1), store.combine
        if not op:
            target[position] = value
            continue
        dtype = plan.operands[store.operand].dtype
        wide = np.float32 if op in _EXTREMES and dtype in ("bf16", "f16") else target.dtype
        with np.errstate(all="ignore"):
            keys, given = (_keys(op, a.astype(wide)) for a in (target, value))
            REDUCTIONS[op].meaning.at(keys, position, given)
            target[...] = _values(op, keys, wide)


class Evaluation:
    """One run of a plan over a slice of its space.

    Args:
        plan: the plan to compute.
        arrays: see `evaluate`.
        first, count: where the slice begins along dim 0, and its extent; all of it if there is none.

    Attributes:
        values: of the nodes: arrays of the plan's rank, with extent 1 along dims that they do not depend on.
        extents: of the slice.
    """

    def __init__(
        self, plan: KernelPlan, arrays: Sequence[np.ndarray], first: int = 0, count: int | None = None
    ) -> None:
        self.plan = plan
        self.operands = [a.reshape(-1) for a in arrays]
        self.first = first
        self.extents = plan.extents if count is None else (count, *plan.extents[1:])
        self.values: list[Array] = []

    def compute(self) -> None:
        with np.errstate(all="ignore"):
            for node in self.plan.nodes:
                self.values.append(self._value(node))

    def stores(self) -> list[Stored]:
        return [self._store(store) for store in self.plan.stores]

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
            return self.reduced(node)
        return apply(node, [self.values[a] for a in node.args])

    def _load(self, node: Load) -> Array:
        source, position = self.operands[node.operand], self._position(node.index)
        if node.where < 0:
            return source[self._inside(node, position)]
        guard, position = np.broadcast_arrays(self.values[node.where], position)
        loaded = np.zeros(guard.shape, source.dtype)
        loaded[guard] = source[self._inside(node, position[guard])]
        return loaded

    def _inside(self, access: Load | Store, position: Array) -> Array:
        """Positions, checked to lie in the array that is read or written.

        Raises:
            CompileError: one is not.
        """
        operand = self.plan.operands[access.operand]
        wrong = position[(position < 0) | (position >= operand.size)]
        if wrong.size:
            does = "reads" if isinstance(access, Load) else "writes"
            raise CompileError(
                f"kernel {self.plan.name} {does} element {wrong.flat[0]} of {operand.name}, which has "
                f"{operand.size} elements: {access.index} at {wrong.size} of {position.size} points"
            )
        return position

    def reduced(self, node: ReduceNode) -> Array:
        plan, value = self.plan, self.values[node.arg]
        axes = tuple(plan.row if node.axis == ROW else plan.outer)
        shape = [self.extents[d] if d in axes else value.shape[d] for d in range(plan.rank)]
        value = np.broadcast_to(value, shape)
        reduction = REDUCTIONS[node.op]
        wide = np.float32 if node.dtype in ("bf16", "f16") else value.dtype
        identity = _keys(node.op, np.asarray(reduction.identity(node.dtype)).astype(wide))
        result = _keys(node.op, value.astype(wide))
        for axis in axes:
            result = reduction.meaning.reduce(
                result, axis=axis, keepdims=True, initial=identity, dtype=result.dtype
            )
        return _values(node.op, result, wide).astype(value.dtype)

    def _store(self, store: Store) -> Stored:
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
        return store, self._inside(store, position).reshape(-1), value.reshape(-1)


def _keys(op: str, values: Array) -> Array:
    """For maxima and minima of floats: integers in their order, -0 below 0 and NaN beyond all."""
    if op not in _EXTREMES or values.dtype.kind != "f":
        return values
    nan = np.copysign(np.asarray(np.nan, values.dtype), 1 if op == "maximum" else -1)
    return _turned(np.where(np.isnan(values), nan, values).view(f"i{values.itemsize}"))


def _values(op: str, keys: Array, dtype: Any) -> Array:
    return keys if keys.dtype == dtype else _turned(keys).view(dtype)


def _turned(bits: Array) -> Array:
    """Bits of floats as integers in their order, and back."""
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


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

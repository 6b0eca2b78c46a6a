"""Values of integers, booleans and small tables of them that do not depend on the arguments of a program.

The index of a branch is computed from the counter of an unrolled loop through many ops, tables and stacked
residuals.  Folding all of these ops would grow the program; here NumPy evaluates them, and the program does
not change.  Floating point is only moved, converted and compared, which is exact.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpmd import ir
from mpmd.passes.calls.signatures import calls_by_callee

MAX_ELEMENTS = 4096
"""Larger arrays are taken to be unknown."""

DTYPES: dict[str, Any] = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "ui8": np.uint8,
    "ui16": np.uint16, "ui32": np.uint32, "ui64": np.uint64, "f16": np.float16, "f32": np.float32,
    "f64": np.float64,
}  # fmt: skip

Array = np.ndarray[Any, Any]
Rule = Callable[..., Any]
"""Computes an op's result from the op and its operands; None where the result is not known."""


class ConstantEvaluator:
    """Evaluates values of one module.  The module must not change meanwhile.

    Args:
        module: the program; arguments of its callees are known if all calls agree on them.
    """

    def __init__(self, module: ir.Module) -> None:
        self._known: dict[ir.Value, Array | None] = {}
        self._calls = calls_by_callee(ir.funcs(module))

    def integer(self, value: ir.Value) -> int | None:
        """The value of a scalar integer or boolean; None if it depends on arguments."""
        array = self.array(value)
        return None if array is None or array.ndim or array.dtype.kind == "f" else int(array)

    def array(self, value: ir.Value) -> Array | None:
        """The array of a value; None if it depends on arguments, or has no rule.

        Chains of updates are as long as loops; hence a stack instead of recursion.
        """
        stack = [value]
        while stack:
            at = stack[-1]
            if at in self._known:
                stack.pop()
                continue
            sources = self._sources(at)
            waiting = [v for v in sources or () if v not in self._known]
            if waiting:
                stack += waiting
                continue
            self._known[at] = None if sources is None else self._evaluate(at, sources)
            stack.pop()
        return self._known[value]

    def _sources(self, value: ir.Value) -> Sequence[ir.Value] | None:
        """The operands of a value; None if it is unknown in any case."""
        kind = value.type
        if not isinstance(kind, ir.RankedTensorType) or str(kind.element_type) not in DTYPES:
            return None
        if math.prod(kind.shape) > MAX_ELEMENTS:
            return None
        op = ir.producer(value)
        if op is None:
            return self._given(value)
        if op.operation.name in _FORWARDED:
            return [op.operands[ir.result_index(value)]]
        return list(op.operands) if op.operation.name in _RULES else None

    def _given(self, argument: ir.Value) -> Sequence[ir.Value] | None:
        """The values passed for the argument of a block: that of a named computation, or of a callee."""
        around, index = argument.owner.owner.opview, ir.arg_index(argument)
        if isinstance(around, ir.NamedComputation):
            return [around.operands[index]]
        calls = self._calls.get(around.symbol) if isinstance(around, ir.Func) else None
        return None if calls is None else [call.operands[index] for call in calls]

    def _evaluate(self, value: ir.Value, sources: Sequence[ir.Value]) -> Array | None:
        arrays = [array for v in sources if (array := self._known[v]) is not None]
        if len(arrays) < len(sources):
            return None
        op = ir.producer(value)
        if op is None or op.operation.name in _FORWARDED:
            same = all(np.array_equal(array, arrays[0]) for array in arrays[1:])
            return arrays[0] if same else None
        return evaluate(op, arrays)


def evaluate(op: ir.Op, arrays: Sequence[Array]) -> Array | None:
    """The result of an op that has a rule, for some operands; None if it is not known."""
    with np.errstate(all="ignore"):
        result = _RULES[op.operation.name](op, *arrays)
    return None if result is None else np.asarray(result, _dtype(op.results[0]))


def _dtype(value: ir.Value) -> Any:
    return DTYPES[str(value.type.element_type)]


def _numbers(op: ir.Op, name: str) -> list[int]:
    return [int(i) for i in ir.DenseI64ArrayAttr(op.attributes[name])]


def _whole(rule: Rule) -> Rule:
    """A rule of arithmetic, for integers and booleans only."""

    def checked(op: ir.Op, *arrays: Array) -> Any:
        return None if any(array.dtype.kind == "f" for array in arrays) else rule(*arrays)

    return checked


def _constant(op: ir.Op) -> Any:
    try:
        return np.array(op.attributes["value"])
    except (TypeError, ValueError):  # it is stored outside of the text
        return None


def _iota(op: ir.Op) -> Array:
    shape, dim = op.results[0].type.shape, ir.IntegerAttr(op.attributes["iota_dimension"]).value
    along = [size if i == dim else 1 for i, size in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[dim]).reshape(along), shape)


def _convert(op: ir.Op, x: Array) -> Array | None:
    dtype = _dtype(op.results[0])
    if x.dtype.kind == "f" and np.dtype(dtype).kind != "f":
        return None  # rounding and range are the platform's
    return x.astype(dtype)


_DIRECTIONS: dict[str, Rule] = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt,
    "GE": operator.ge,
}  # fmt: skip


def _compare(op: ir.Op, a: Array, b: Array) -> Any:
    if "compare_type" in op.attributes and "TOTALORDER" in str(op.attributes["compare_type"]):
        return None
    direction = str(op.attributes["comparison_direction"]).rpartition(" ")[2].rstrip(">")
    return _DIRECTIONS[direction](a, b)


def _divide(a: Array, b: Array) -> Any:
    return (a - np.fmod(a, b)) // b if b.all() else None


def _remainder(a: Array, b: Array) -> Any:
    return np.fmod(a, b) if b.all() else None


def _slice(op: ir.Op, x: Array) -> Array:
    edges = (_numbers(op, name) for name in ("start_indices", "limit_indices", "strides"))
    return x[tuple(map(slice, *edges))]


def _piece(x: Array, sizes: Sequence[int], starts: Sequence[Array]) -> tuple[slice, ...]:
    """Where a piece is whose starts are clamped, so that it ends within `x`."""
    clamped = [min(max(int(s), 0), whole - size) for s, whole, size in zip(starts, x.shape, sizes)]
    return tuple(slice(start, start + size) for start, size in zip(clamped, sizes))


def _dynamic_slice(op: ir.Op, x: Array, *starts: Array) -> Array:
    return x[_piece(x, _numbers(op, "slice_sizes"), starts)]


def _dynamic_update_slice(op: ir.Op, x: Array, update: Array, *starts: Array) -> Array:
    updated = x.copy()
    updated[_piece(x, update.shape, starts)] = update
    return updated


def _broadcast(op: ir.Op, x: Array) -> Array:
    shape, dims = op.results[0].type.shape, _numbers(op, "broadcast_dimensions")
    along = [1] * len(shape)
    for dim, size in zip(dims, x.shape):
        along[dim] = size
    return np.broadcast_to(x.transpose(np.argsort(dims)).reshape(along), shape)


_FORWARDED = ("stablehlo.optimization_barrier", "mpmd.named_tensor", "mpmd.broadcast")
"""Ops whose every result is the operand of the same number."""

_RULES: dict[str, Rule] = {
    "constant": _constant,
    "iota": _iota,
    "convert": _convert,
    "compare": _compare,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda op, x: x.reshape(op.results[0].type.shape),
    "transpose": lambda op, x: x.transpose(_numbers(op, "permutation")),
    "reverse": lambda op, x: np.flip(x, tuple(_numbers(op, "dimensions"))),
    "concatenate": lambda op, *x: np.concatenate(x, ir.IntegerAttr(op.attributes["dimension"]).value),
    "select": lambda op, p, a, b: np.where(p, a, b),
    "add": _whole(np.add),
    "subtract": _whole(np.subtract),
    "multiply": _whole(np.multiply),
    "divide": _whole(_divide),
    "remainder": _whole(_remainder),
    "maximum": _whole(np.maximum),
    "minimum": _whole(np.minimum),
    "clamp": _whole(lambda low, x, high: np.minimum(np.maximum(low, x), high)),
    "negate": _whole(np.negative),
    "abs": _whole(np.abs),
    "sign": _whole(np.sign),
    "and": _whole(np.bitwise_and),
    "or": _whole(np.bitwise_or),
    "xor": _whole(np.bitwise_xor),
    "not": _whole(np.invert),
}
_RULES = {f"stablehlo.{name}": rule for name, rule in _RULES.items()}

"""Rules of operations on stacks: how each is computed part by part.

`RULES` is the table.  A reduction over the stacked dim combines the results of the parts; every other
operation computes the parts of its result from the parts of its operands.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.jax_compat import rebind
from mpmd.tracing.stages.stacked.by_parts import (
    PartwiseInterpreter,
    Rule,
    Zeros,
    array,
    call,
    inlined,
    of_cond,
    of_scan,
    of_while,
)
from mpmd.tracing.stages.stacked.stacked import Stacked, in_parts, is_of_rows

ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt",
    "ceil", "clamp", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "ne", "neg", "nextafter", "not", "or", "pow", "real", "reduce_precision", "rem", "reshard", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
)  # fmt: skip

REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_or": jax.lax.bitwise_or,
    "reduce_and": jax.lax.bitwise_and,
}

ALONG_A_DIM = (
    "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "argmax", "argmin", "rev", "split",
)  # fmt: skip
"""Operations along some dims, which compute part by part along the others."""


def _stacks(operands: Sequence[Any]) -> list[Stacked]:
    return [value for value in operands if isinstance(value, Stacked)]


def _alike(stacks: Sequence[Stacked]) -> bool:
    return len({(stack.dim, stack.lengths) for stack in stacks}) == 1


def elementwise(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """Operands of equal shapes, or scalars."""
    stacks = _stacks(operands)
    if not _alike(stacks):
        return None
    like = stacks[0]
    parts_of_result = []
    for k in range(len(like.parts)):
        parts = [of.part(value, like, k) for value in operands]
        known = _of_zeros(equation, parts)
        parts_of_result.append(rebind(equation, list(map(array, parts))) if known is None else [known])
    return [Stacked(parts, like.dim) for parts in zip(*parts_of_result)]


def _of_zeros(equation: Any, parts: Sequence[Any]) -> Any:
    """The result of an operation on parts that are known to be zero, if it is known too."""
    zeros = [isinstance(part, Zeros) for part in parts]
    name = equation.primitive.name
    if name in ("add", "add_any") and any(zeros):
        return parts[1 - zeros.index(True)]
    if zeros[0] and name in ("mul", "div", "neg", "copy"):
        return parts[0]
    if zeros[0] and name == "convert_element_type":
        return Zeros(parts[0].shape, equation.params["new_dtype"])
    return None


def reduction(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """Over other dims by parts; over the stacked dim the results of the parts are combined."""
    stack, axes = operands[0], equation.params["axes"]
    parts = [rebind(equation, [array(part)])[0] for part in stack.parts]
    if stack.dim in axes:
        return [functools.reduce(REDUCTIONS[equation.primitive.name], parts)]
    return [Stacked(parts, stack.dim - sum(axis < stack.dim for axis in axes))]


def along_a_dim(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """Along other dims than the stacked one; `argmax` and `argmin` drop theirs."""
    params, like = equation.params, _stacks(operands)[0]
    given = next(params[name] for name in ("axis", "dimension", "dimensions", "axes") if name in params)
    axes = (given,) if isinstance(given, int) else tuple(given)
    if like.dim in axes or not _alike(_stacks(operands)):
        return None
    dropped = sum(axis < like.dim for axis in axes) if equation.primitive.name in ("argmax", "argmin") else 0
    parts_of_result = [
        rebind(equation, [array(of.part(value, like, k)) for value in operands])
        for k in range(len(like.parts))
    ]
    return [Stacked(parts, like.dim - dropped) for parts in zip(*parts_of_result)]


def broadcast_in_dim(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """The stacked dim keeps its size: a broadcast repeats no rows of several."""
    (stack, *_), dims = operands, equation.params["broadcast_dimensions"]
    dim, parts_of_result = dims[stack.dim], []
    for part in map(array, stack.parts):
        shape = list(equation.params["shape"])
        shape[dim] = part.shape[stack.dim]
        parts_of_result.append(jax.lax.broadcast_in_dim(part, shape, dims))
    return [Stacked(parts_of_result, dim)]


def reshape(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """Into a shape of which a dim begins where the stacked one does, and each part fills whole rows of it."""
    stack, shape = operands[0], equation.params["new_sizes"]
    if equation.params["dimensions"] is not None:
        return None
    before = math.prod(stack.shape[: stack.dim])
    counts = [math.prod(part.shape) // before for part in stack.parts]
    for dim, size in enumerate(shape):
        row = math.prod(shape[dim + 1 :])
        if math.prod(shape[:dim]) == before and size > 1 and all(count % row == 0 for count in counts):
            parts = [
                jnp.reshape(array(part), (*shape[:dim], count // row, *shape[dim + 1 :]))
                for part, count in zip(stack.parts, counts)
            ]
            return [Stacked(parts, dim)]
    return None


def squeeze(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    stack, dims = operands[0], equation.params["dimensions"]
    if stack.dim in dims:
        return None
    parts = [rebind(equation, [array(part)])[0] for part in stack.parts]
    return [Stacked(parts, stack.dim - sum(dim < stack.dim for dim in dims))]


def transpose(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    stack = operands[0]
    parts = [rebind(equation, [array(part)])[0] for part in stack.parts]
    return [Stacked(parts, equation.params["permutation"].index(stack.dim))]


def slice_(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """The parts, or slices of them, that are in the range; one alone is an array."""
    stack, params = operands[0], equation.params
    starts, limits, strides = params["start_indices"], params["limit_indices"], params["strides"]
    if strides is not None and strides[stack.dim] != 1:
        return None
    begin, taken = 0, []
    for part, length in zip(stack.parts, stack.lengths):
        low, high = max(starts[stack.dim] - begin, 0), min(limits[stack.dim] - begin, length)
        if low < high:
            start, limit = list(starts), list(limits)
            start[stack.dim], limit[stack.dim] = low, high
            whole = (low, high) == (0, length) and start == [0] * len(start) and limit == list(part.shape)
            taken.append(part if whole else jax.lax.slice(array(part), start, limit, strides))
        begin += length
    return [array(taken[0])] if len(taken) == 1 else [Stacked(taken, stack.dim)] if taken else None


def pad(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """Zeros around the rows of one part are the gradient of its slice: a stack whose other parts are zero."""
    value, fill = operands
    config = [tuple(map(int, of_dim)) for of_dim in equation.params["padding_config"]]
    if isinstance(value, Stacked):
        if config[value.dim] != (0, 0, 0):
            return None
        return [Stacked([rebind(equation, [array(part), fill])[0] for part in value.parts], value.dim)]
    if (
        not config
        or isinstance(fill, jax.core.Tracer)
        or float(fill) != 0.0
        or any(map(any, config[1:]))
        or config[0][2]
    ):
        return None
    shape = jnp.shape(value)
    for lengths in of.divisions:
        ends = list(itertools.accumulate(lengths))
        for number, (end, length) in enumerate(zip(ends, lengths)):
            if (config[0][0], config[0][1], shape[0]) == (end - length, ends[-1] - end, length):
                zeros: list[Any] = [Zeros((n, *shape[1:]), equation.outvars[0].aval.dtype) for n in lengths]
                zeros[number] = value
                return [Stacked(zeros)]
    return None


def concatenate(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """Along other dims part by part; along dim 0 the rows of all stages are a stack."""
    dim, stacks = equation.params["dimension"], _stacks(operands)
    if not stacks:
        lengths = tuple(jnp.shape(value)[dim] for value in operands)
        of_parts = dim == 0 and len(lengths) > 1 and lengths in of.divisions and is_of_rows(equation)
        return [Stacked(operands)] if of_parts else None
    like = stacks[0]
    if like.dim == dim or not _alike(stacks):
        return None
    parts = [
        jax.lax.concatenate([array(of.part(value, like, k)) for value in operands], dim)
        for k in range(len(like.parts))
    ]
    return [Stacked(parts, like.dim)]


def dot_general(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """The stacked dim is a batch dim, a contracted one (the products of parts are added), or a free one."""
    dims, batches = equation.params["dimension_numbers"]
    roles = [_role(v, c, b) for v, c, b in zip(operands, dims, batches) if isinstance(v, Stacked)]
    both = len(roles) == 2
    if both and (roles[0] != roles[1] or roles[0][0] == "free" or operands[0].lengths != operands[1].lengths):
        return None
    (role, at), like = roles[0], _stacks(operands)[0]

    def side(number: int, k: int) -> Any:
        value = operands[number]
        if isinstance(value, Stacked):
            return array(value.parts[k])
        if role == "free":
            return value
        own = (dims if role == "contracted" else batches)[number][at]
        return in_parts(value, like.lengths, own).parts[k]

    parts = [rebind(equation, [side(0, k), side(1, k)])[0] for k in range(len(like.parts))]
    if role == "contracted":
        return [functools.reduce(jax.lax.add, parts)]
    if role == "batch":
        return [Stacked(parts, at)]
    left = isinstance(operands[0], Stacked)
    free = at if left else at + np.ndim(operands[0]) - len(dims[0]) - len(batches[0])
    return [Stacked(parts, len(batches[0]) + free)]


def _role(stack: Stacked, contracted: Sequence[int], batch: Sequence[int]) -> tuple[str, int]:
    """Whether the stacked dim of an operand is contracted, a batch dim or free, and which of these it is."""
    for name, dims in (("contracted", contracted), ("batch", batch)):
        if stack.dim in dims:
            return name, list(dims).index(stack.dim)
    free = [dim for dim in range(stack.ndim) if dim not in contracted and dim not in batch]
    return "free", free.index(stack.dim)


def barrier(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    values = [list(map(array, v.parts)) if isinstance(v, Stacked) else [v] for v in operands]
    by_value = [jax.lax.optimization_barrier(parts) for parts in values]
    return [
        Stacked(parts, v.dim) if isinstance(v, Stacked) else parts[0] for parts, v in zip(by_value, operands)
    ]


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(ALONG_A_DIM, along_a_dim),
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "squeeze": squeeze,
    "transpose": transpose,
    "slice": slice_,
    "pad": pad,
    "concatenate": concatenate,
    "dot_general": dot_general,
    "optimization_barrier": barrier,
    "jit": call,
    "pjit": call,
    "custom_jvp_call": inlined,
    "custom_vjp_call": inlined,
    "checkpoint": inlined,
    "scan": of_scan,
    "while": of_while,
    "cond": of_cond,
}
"""Name of a primitive → its rule."""

FROM_ARRAYS = ("pad", "concatenate")
"""Primitives whose rules may create stacks, of operands that are not."""

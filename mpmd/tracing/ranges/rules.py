"""Rules: what a range of the result of an operation needs of its operands, and how it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpmd.jax_compat import rebind
from mpmd.tracing.ranges.random_bits import random_bits
from mpmd.tracing.ranges.range import Range, RangeComputation
from mpmd.tracing.stages.stacked.part_rules import ELEMENTWISE, REDUCTIONS

Rule = Callable[[Any, Range], RangeComputation | None]
"""Of an equation with one result, and a range of it; None if it must be computed whole."""


def _again(equation: Any, operands: Sequence[Range | None], **changed: Any) -> RangeComputation:
    return RangeComputation(tuple(enumerate(operands)), lambda given: rebind(equation, given, **changed)[0])


def _resized(shape: Sequence[int], wanted: Range) -> tuple[int, ...]:
    return (*shape[: wanted.dim], wanted.size, *shape[wanted.dim + 1 :])


def _elementwise(equation: Any, wanted: Range) -> RangeComputation | None:
    """Operands of the shape of the result; scalars and dims of size 1 are repeated."""
    shape = equation.outvars[0].aval.shape
    operands: list[Range | None] = []
    for operand in equation.invars:
        own = operand.aval.shape
        if len(own) not in (0, len(shape)):
            return None
        operands.append(wanted if own and own[wanted.dim] == shape[wanted.dim] else None)
    return _again(equation, operands)


def _broadcast_in_dim(equation: Any, wanted: Range) -> RangeComputation | None:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    own = equation.invars[0].aval.shape
    read = None
    if wanted.dim in dims:
        at = dims.index(wanted.dim)
        read = wanted.along(at) if own[at] == shape[wanted.dim] else None
    if len(equation.invars) != 1 or equation.params.get("sharding") is not None:
        return None
    return _again(equation, [read], shape=_resized(shape, wanted))


def _reshape(equation: Any, wanted: Range) -> RangeComputation | None:
    """A dim that stays: as many elements before it, and of the same size."""
    shape, own = equation.outvars[0].aval.shape, equation.invars[0].aval.shape
    if equation.params.get("dimensions") is not None or equation.params.get("sharding") is not None:
        return None
    before = math.prod(shape[: wanted.dim])
    for dim, size in enumerate(own):
        if math.prod(own[:dim]) == before and size == shape[wanted.dim]:
            return _again(equation, [wanted.along(dim)], new_sizes=_resized(shape, wanted))
    return None


def _squeeze(equation: Any, wanted: Range) -> RangeComputation | None:
    kept = [k for k in range(len(equation.invars[0].aval.shape)) if k not in equation.params["dimensions"]]
    return _again(equation, [wanted.along(kept[wanted.dim])])


def _transpose(equation: Any, wanted: Range) -> RangeComputation | None:
    return _again(equation, [wanted.along(equation.params["permutation"][wanted.dim])])


def _reduction(equation: Any, wanted: Range) -> RangeComputation | None:
    axes = equation.params["axes"]
    kept = [k for k in range(len(equation.invars[0].aval.shape)) if k not in axes]
    return _again(equation, [wanted.along(kept[wanted.dim])])


def _iota(equation: Any, wanted: Range) -> RangeComputation | None:
    dtype, shape, dim = (equation.params[k] for k in ("dtype", "shape", "dimension"))
    if equation.invars or equation.params.get("sharding") is not None:
        return None

    def compute(_: Sequence[Any]) -> Any:
        made = jax.lax.broadcasted_iota(dtype, _resized(shape, wanted), dim)
        return made + jax.numpy.asarray(wanted.start, dtype) if dim == wanted.dim else made

    return RangeComputation((), compute)


def _concatenate(equation: Any, wanted: Range) -> RangeComputation | None:
    along = equation.params["dimension"]
    if along != wanted.dim:
        return _again(equation, [wanted] * len(equation.invars))
    read: list[tuple[int, Range | None]] = []
    begin = 0
    for k, operand in enumerate(equation.invars):
        end = begin + operand.aval.shape[along]
        start, stop = max(begin, wanted.start), min(end, wanted.stop)
        if start < stop:
            read.append((k, Range(along, start - begin, stop - begin)))
        begin = end
    return RangeComputation(tuple(read), lambda given: jax.lax.concatenate(given, along))


def _slice(equation: Any, wanted: Range) -> RangeComputation | None:
    starts, limits, strides = (equation.params[k] for k in ("start_indices", "limit_indices", "strides"))
    dim = wanted.dim
    if strides is not None and strides[dim] != 1:
        return None
    read = Range(dim, starts[dim] + wanted.start, starts[dim] + wanted.stop)
    changed = {
        "start_indices": (*starts[:dim], 0, *starts[dim + 1 :]),
        "limit_indices": (*limits[:dim], wanted.size, *limits[dim + 1 :]),
    }
    return _again(equation, [read], **changed)


def _of_keys(equation: Any, wanted: Range) -> RangeComputation | None:
    """One computation for each random key: a range of keys gives a range of results."""
    keys = equation.invars[0].aval.shape
    return _again(equation, [wanted]) if wanted.dim < len(keys) else None


def _random_bits(equation: Any, wanted: Range) -> RangeComputation | None:
    return random_bits(equation, wanted) or _of_keys(equation, wanted)


RULES: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, "bitcast_convert_type", "random_clone", "random_fold_in"), _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(("random_seed", "random_split", "random_wrap", "random_unwrap"), _of_keys),
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "iota": _iota,
    "concatenate": _concatenate,
    "slice": _slice,
    "random_bits": _random_bits,
}
"""Name of a primitive → its rule."""

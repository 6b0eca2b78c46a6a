"""mpmd-scale-smaller-factor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from mpmd import ir
from mpmd.passes.bases import FunctionPass

# Kinds of elements for which a product may be scaled after it as well as before it: floating point that
# overflows late, and for multiplication integers, which wrap around either way.
_FLOATS = frozenset({"f32", "f64", "bf16"})
_INTEGERS = frozenset({"i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64"})


class ScaleSmallerFactor(FunctionPass):
    """Scales the other factor of a matrix product, or its result, where that is smaller.

        p = divide e, (broadcast s [0])                    (f32[512,512])
        y = dot_general p, v contracting [1] x [0]         (f32[512,64])
        -->
        z = dot_general e, v contracting [1] x [0]
        y = divide z, (broadcast s [0])                    (f32[512,64])

    A scale that varies along contracted and batch dims alone can go to the other factor, one that varies
    along free and batch dims alone can go to the result.  It goes if at most half as many elements are then
    scaled.  A softmax is thus normalised after it has been multiplied with the values, forward, and on the
    incoming gradient, backward.  Sums are of scaled terms instead of scaled sums: last bits may differ.

    Requires: nothing.  Ensures: same values within rounding.  Cost: linear.
    Source: the order of operations of online softmax (Milakov and Gimelshein, 2018), for any product.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """Visits both factors of every product, in regions too."""
        for op in ir.walk(f):
            if op.operation.name == "stablehlo.dot_general" and "algorithm" not in op.attributes:
                dot = op
                for side in (0, 1):
                    dot = _move_scale(dot, side)


@dataclasses.dataclass(frozen=True)
class _Scale:
    """`op` multiplies `value` by, or divides it by, a broadcast of `factor` along `dims`."""

    op: ir.Op
    value: ir.Value
    factor: ir.Value
    dims: tuple[int, ...]


def _move_scale(dot: ir.Op, side: int) -> ir.Op:
    """Moves the scale of a factor, if it has one that is cheaper elsewhere; returns the product."""
    scale = _scale_of(dot.operands[side])
    if scale is None:
        return dot
    target = _cheapest_target(dot, side, scale)
    if target is None:
        return dot
    scaled, dims = target
    operands = list(dot.operands)
    operands[side] = scale.value
    if scaled != "result":
        operands[1 - side] = _apply(scale, operands[1 - side], dims, dot)
    made = ir.create(
        "stablehlo.dot_general", operands, [dot.results[0].type], ir.before(dot),
        dict(dot.attributes.items()), dot.location,
    )  # fmt: skip
    result = _apply(scale, made.results[0], dims, dot) if scaled == "result" else made.results[0]
    ir.replace(dot, [result])
    ir.erase(scale.op)
    return made


def _scale_of(value: ir.Value) -> _Scale | None:
    """The scale of a value that only the product reads, if it has one."""
    op = ir.producer(value)
    if op is None or op.operation.name not in ("stablehlo.multiply", "stablehlo.divide"):
        return None
    is_product = op.operation.name == "stablehlo.multiply"
    if str(value.type.element_type) not in (_FLOATS | _INTEGERS if is_product else _FLOATS):
        return None
    if len(ir.users(op)) > 1:
        return None
    left, right = op.operands
    pairs = [(left, right), (right, left)] if is_product else [(left, right)]
    for scaled, factor in pairs:
        broadcast = ir.producer(factor)
        if broadcast is not None and broadcast.operation.name == "stablehlo.broadcast_in_dim":
            source = broadcast.operands[0]
            at = list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))
            dims = tuple(dim for dim, size in zip(at, source.type.shape, strict=True) if size != 1)
            if 0 < len(dims) < len(value.type.shape):
                return _Scale(op, scaled, source, dims)
    return None


def _cheapest_target(dot: ir.Op, side: int, scale: _Scale) -> tuple[str, tuple[int, ...]] | None:
    """`"factor"` or `"result"` with the dims of it along which the scale varies, if one is worth it."""
    numbers = ir.stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    batch = (list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions))
    contracted = (list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions))
    summed_or_batch = [b + c for b, c in zip(batch, contracted, strict=True)]
    to_factor = dict(zip(summed_or_batch[side], summed_or_batch[1 - side], strict=True))
    free = [
        [d for d in range(len(factor.type.shape)) if d not in dims]
        for factor, dims in zip(dot.operands, summed_or_batch, strict=True)
    ]
    first = len(batch[0]) + (len(free[0]) if side else 0)
    to_result = {d: i for i, d in enumerate(batch[side])} | {d: first + i for i, d in enumerate(free[side])}
    candidates = (
        ("factor", to_factor, dot.operands[1 - side]),
        ("result", to_result, dot.results[0]),
    )
    found = [
        (_size(value), name, dims)
        for name, mapping, value in candidates
        if value.type.element_type == scale.value.type.element_type
        and (dims := _mapped(scale.dims, mapping)) is not None
        and 2 * _size(value) <= _size(scale.value)
    ]
    return min(found)[1:] if found else None


def _mapped(dims: tuple[int, ...], mapping: Mapping[int, int]) -> tuple[int, ...] | None:
    return tuple(mapping[d] for d in dims) if all(d in mapping for d in dims) else None


def _size(value: ir.Value) -> int:
    return math.prod(value.type.shape)


def _apply(scale: _Scale, value: ir.Value, dims: tuple[int, ...], dot: ir.Op) -> ir.Value:
    """Scales another value, along its own dims, right before the product."""
    kind, where = scale.value.type.element_type, ir.before(dot)
    shape = [value.type.shape[d] for d in dims]
    factor = scale.factor
    if list(factor.type.shape) != shape:
        squeezed = ir.RankedTensorType.get(shape, kind)
        factor = ir.create("stablehlo.reshape", [factor], [squeezed], where, {}, dot.location).results[0]
    spread = ir.create(
        "stablehlo.broadcast_in_dim", [factor], [value.type], where,
        {"broadcast_dimensions": ir.DenseI64ArrayAttr.get(dims)}, dot.location,
    )  # fmt: skip
    scaled = [value, spread.results[0]]
    return ir.create(scale.op.operation.name, scaled, [value.type], where, {}, dot.location).results[0]

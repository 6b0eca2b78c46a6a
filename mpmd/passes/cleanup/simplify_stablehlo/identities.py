"""Ops without an effect, and pairs that are one op."""

from __future__ import annotations

import math
from collections.abc import Callable

from mpmd import ir
from mpmd.passes.cleanup.simplify_stablehlo.facts import (
    Facts,
    array,
    integer_kind,
    is_constant,
    make,
    numbers,
    reshaped,
)
from mpmd.passes.constants import zeros


def same_type(op: ir.Op, facts: Facts) -> ir.Value | None:
    """A convert, reshape or the like to the value's own type -> the value."""
    value = op.operands[0]
    return value if value.type == op.results[0].type else None


def reshape_of_reshape(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`reshape (reshape x)` -> `reshape x`."""
    inner = ir.producer(op.operands[0])
    if inner is None or inner.operation.name != "stablehlo.reshape":
        return None
    return reshaped(inner.operands[0], op.results[0].type, op)


def transpose(op: ir.Op, facts: Facts) -> ir.Value | None:
    """A transpose that moves no dim -> its operand; two transposes -> one, or none."""
    order = numbers(op.attributes["permutation"])
    value = op.operands[0]
    if order == sorted(order):
        return value
    inner = ir.producer(value)
    if inner is None or inner.operation.name != "stablehlo.transpose":
        return None
    first = numbers(inner.attributes["permutation"])
    both = [first[i] for i in order]
    if both == sorted(both):
        return inner.operands[0]
    return make(
        "stablehlo.transpose", [inner.operands[0]], op.results[0].type, op, {"permutation": array(both)}
    )


def broadcast(op: ir.Op, facts: Facts) -> ir.Value | None:
    """A broadcast that repeats nothing -> reshape, or its operand; two broadcasts -> one."""
    value, kind = op.operands[0], op.results[0].type
    dims = numbers(op.attributes["broadcast_dimensions"])
    if dims == sorted(dims) and math.prod(value.type.shape) == math.prod(kind.shape):
        return reshaped(value, kind, op)
    inner = ir.producer(value)
    if inner is None or inner.operation.name != "stablehlo.broadcast_in_dim":
        return None
    both = [dims[i] for i in numbers(inner.attributes["broadcast_dimensions"])]
    attributes = {"broadcast_dimensions": array(both)}
    return make("stablehlo.broadcast_in_dim", [inner.operands[0]], kind, op, attributes)


def add_zero(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`x + 0` -> `x`; as in XLA, where a zero `x` keeps its sign too."""
    return _beside(op, lambda value: facts.number(value) == 0)


def subtract_nothing(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`x - 0` -> `x`: for integers, and for floating point +0."""
    text = facts.splat(op.operands[1])
    is_integer = integer_kind(op.results[0].type) is not None
    if text is not None and (text == "0" if is_integer else _number(text) == (0.0, 1.0)):
        return op.operands[0]
    return None


def multiply_by_one(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`x * 1` -> `x`."""
    return _beside(op, lambda value: _is_one(facts.splat(value)))


def divide_by_one(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`x / 1` -> `x`."""
    return op.operands[0] if _is_one(facts.splat(op.operands[1])) else None


def constant_last(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`c + x` -> `x + c`, of all that may be exchanged."""
    left, right = op.operands
    if not is_constant(left) or is_constant(right):
        return None
    return make(op.operation.name, [right, left], op.results[0].type, op)


def nothing_left(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`x * 0`, `x and 0` -> `0` and `x - x` -> `0`: for integers."""
    kind = op.results[0].type
    if integer_kind(kind) is None:
        return None
    left, right = op.operands
    if op.operation.name == "stablehlo.subtract":
        return zeros(kind, op) if left == right else None
    return next((v for v in (left, right) if facts.splat(v) in ("0", "false")), None)


def with_neutral(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`p and true`, `p or false` -> `p`."""
    neutral = "true" if op.operation.name == "stablehlo.and" else "false"
    return _beside(op, lambda value: facts.splat(value) == neutral)


def _beside(op: ir.Op, is_neutral: Callable[[ir.Value], bool]) -> ir.Value | None:
    """The operand of a binary op whose other operand is neutral."""
    left, right = op.operands
    return left if is_neutral(right) else right if is_neutral(left) else None


def _is_one(text: str | None) -> bool:
    return text is not None and (text in ("1", "true") or _number(text) == (1.0, 1.0))


def _number(text: str) -> tuple[float, float] | None:
    """A decimal number and its sign; None for other notations, such as hexadecimal."""
    try:
        value = float(text)
    except ValueError:
        return None
    return abs(value), math.copysign(1.0, value)

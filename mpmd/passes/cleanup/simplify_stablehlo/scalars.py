"""Arithmetic on scalar integer and boolean constants: indices, trip counts, conditions."""

from __future__ import annotations

import operator
from collections.abc import Callable

from mpmd import ir
from mpmd.passes.cleanup.simplify_stablehlo.facts import Facts, constant, integer_kind, wrapped

_ARITHMETIC: dict[str, Callable[..., int]] = {
    "stablehlo.add": operator.add,
    "stablehlo.subtract": operator.sub,
    "stablehlo.multiply": operator.mul,
    "stablehlo.maximum": max,
    "stablehlo.minimum": min,
    "stablehlo.and": operator.and_,
    "stablehlo.or": operator.or_,
    "stablehlo.xor": operator.xor,
    "stablehlo.not": operator.invert,
    "stablehlo.negate": operator.neg,
    "stablehlo.convert": lambda x: x,
    "stablehlo.clamp": lambda low, x, high: min(max(low, x), high),
}
_COMPARISON: dict[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
NAMES = tuple(_ARITHMETIC)


def fold_arithmetic(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`add 2 3` -> `5`; wraps around as the type does."""
    kind = _scalar_integer(op)
    operands = facts.integers(op.operands) if kind is not None else None
    if kind is None or operands is None:
        return None
    if op.operation.name == "stablehlo.convert" and kind[1] == 1:
        return constant(int(operands[0] != 0), op)
    # The sum and product of booleans are "or" and "and".
    if kind[1] == 1 and op.operation.name == "stablehlo.add":
        return constant(int(any(operands)), op)
    return constant(wrapped(_ARITHMETIC[op.operation.name](*operands), kind), op)


def fold_compare(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`compare LT 2 3` -> `true`."""
    operands = facts.integers(op.operands)
    if operands is None:
        return None
    direction = str(op.attributes["comparison_direction"]).rpartition(" ")[2].rstrip(">")
    return constant(int(_COMPARISON[direction](*operands)), op)


def fold_select(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`select true a b` -> `a`; `select p a a` -> `a`."""
    condition, on_true, on_false = op.operands
    if on_true == on_false:
        return on_true
    chosen = facts.splat(condition)
    return {"true": on_true, "false": on_false}.get(chosen or "")


def _scalar_integer(op: ir.Op) -> tuple[bool, int] | None:
    kind = op.results[0].type
    if not isinstance(kind, ir.RankedTensorType) or kind.rank:
        return None
    return integer_kind(kind)

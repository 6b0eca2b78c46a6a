"""Ops without an effect, pairs that are one op, and ops of constants.

Scalar integers and booleans (indices, trip counts, conditions) are evaluated by NumPy, ops of whole constants
by StableHLO's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpmd import ir
from mpmd.passes.cleanup.stablehlo_facts import (
    Facts,
    array,
    integer_kind,
    is_constant,
    make,
    numbers,
    reshaped,
)
from mpmd.passes.constant_evaluation import DTYPES, evaluate
from mpmd.passes.structure import constant_text, splat, zeros
from mpmd.support.memoisation import memoised


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


_SCALAR_OPS = "add and clamp compare convert maximum minimum multiply negate not or subtract xor"
SCALAR_OPS = tuple("stablehlo." + name for name in _SCALAR_OPS.split())


def fold_scalars(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`add 2 3` -> `5`, which wraps around as the type does; `compare LT 2 3` -> `true`."""
    kind = op.results[0].type
    if not isinstance(kind, ir.RankedTensorType) or kind.rank or integer_kind(kind) is None:
        return None
    operands = facts.integers(op.operands)
    *dtypes, target = (DTYPES.get(str(value.type.element_type)) for value in (*op.operands, op.results[0]))
    if operands is None or None in dtypes or target is None:  # NumPy has no narrow integers
        return None
    result = evaluate(op, [np.array(n, dtype) for n, dtype in zip(operands, dtypes)])
    return None if result is None else splat(str(result.item()).lower(), kind, op)


def fold_select(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`select true a b` -> `a`; `select p a a` -> `a`."""
    condition, on_true, on_false = op.operands
    if on_true == on_false:
        return on_true
    chosen = facts.splat(condition)
    return {"true": on_true, "false": on_false}.get(chosen or "")


_MAX_ELEMENTS = 1 << 16
_ELEMENTWISE = tuple(
    f"stablehlo.{name}"
    for name in (
        "abs", "add", "and", "clamp", "compare", "convert", "cosine", "divide", "exponential", "log",
        "maximum", "minimum", "multiply", "negate", "not", "or", "remainder", "rsqrt", "select", "sign",
        "sine", "sqrt", "subtract", "tanh", "xor",
    )
)  # fmt: skip
_MOVING = tuple(
    f"stablehlo.{name}"
    for name in ("broadcast_in_dim", "concatenate", "reshape", "reverse", "slice", "transpose")
)
FOLDED_OPS = (*_ELEMENTWISE, *_MOVING)


def fold(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`add c d` -> the sum, as a constant."""
    operands, kind = list(op.operands), op.results[0].type
    if not operands or not all(_is_plain(v) for v in operands) or not _is_defined(op, facts):
        return None
    splats = [facts.splat(v) for v in operands]
    if op.operation.name in _ELEMENTWISE and None not in splats:
        scalars = [_scalar(v.type) for v in operands]
        texts = [f"dense<{splat}> : {scalar}" for splat, scalar in zip(splats, scalars)]
        one = _computed(op.operation.name, _options(op), tuple(texts), tuple(scalars), _scalar(kind))
        value = ir.Attribute.parse(f"{str(one).rpartition(' : ')[0]} : {kind}", ir.context())
    elif max(math.prod(v.type.shape) for v in (*operands, op.results[0])) <= _MAX_ELEMENTS:
        texts = [constant_text(ir.producer(v)) for v in operands]
        types = tuple(str(v.type) for v in operands)
        value = _computed(op.operation.name, _options(op), tuple(texts), types, str(kind))
    else:
        return None
    return make("stablehlo.constant", [], kind, op, {"value": value})


def _is_plain(value: ir.Value) -> bool:
    return is_constant(value) and not isinstance(value.type.element_type, ir.ComplexType)


def _is_defined(op: ir.Op, facts: Facts) -> bool:
    """Whether there is a result: none for integers divided by zero, or for conversions out of range."""
    kind, name = op.results[0].type, op.operation.name
    if integer_kind(kind) is None or name not in (
        "stablehlo.divide",
        "stablehlo.remainder",
        "stablehlo.convert",
    ):
        return True
    number = facts.number(op.operands[-1])
    if name == "stablehlo.convert":
        return integer_kind(op.operands[0].type) is not None or (number is not None and abs(number) < 128)
    return number is not None and number > 0


def _scalar(kind: ir.Type) -> str:
    return f"tensor<{kind.element_type}>"


def _options(op: ir.Op) -> str:
    return ", ".join(f"{name} = {a}" for name, a in op.attributes.items() if "." not in name)


@memoised()
def _computed(
    name: str, options: str, values: tuple[str, ...], types: tuple[str, ...], kind: str
) -> ir.Attribute:
    """The result of an op on constants: values and types as text, with its attributes between commas."""
    lines = [f"%{i} = stablehlo.constant {value}" for i, value in enumerate(values)]
    given = ", ".join(f"%{i}" for i in range(len(values)))
    lines.append(f'%r = "{name}"({given}) {{{options}}} : ({", ".join(types)}) -> {kind}')
    body = "\n".join([*lines, f"return %r : {kind}"])
    module = ir.parse(f"func.func @main() -> {kind} {{\n{body}\n}}")
    return ir.stablehlo.eval_module(module, [])[0]

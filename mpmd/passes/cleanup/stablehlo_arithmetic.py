"""Ops without an effect, pairs that are one op, and ops of constants.

Scalar integers and booleans (indices, trip counts, conditions) are evaluated by NumPy, ops of whole constants
by StableHLO's interpreter.

`Facts` answers what the rules ask about values: constants, shapes, where the pieces of a concatenate begin.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mpmd import ir
from mpmd.passes.constant_evaluation import DTYPES, evaluate
from mpmd.passes.structure import constant_text, holds_complex, splat, zeros
from mpmd.support.resources import memoised

_INTEGER = re.compile(r"(u?)i(\d+)")


class Facts:
    """Facts about ops and values, each computed once.  No op may be erased while it is used."""

    def __init__(self) -> None:
        self._splats: dict[ir.Value, str | None] = {}
        self._offsets: dict[ir.Op, list[int]] = {}

    def splat(self, value: ir.Value) -> str | None:
        """The one element of a constant, or of a constant scalar broadcast, as text; None otherwise."""
        if value not in self._splats:
            self._splats[value] = self._splat(value)
        return self._splats[value]

    def _splat(self, value: ir.Value) -> str | None:
        op = ir.producer(value)
        if op is None:
            return None
        if op.operation.name == "stablehlo.broadcast_in_dim":
            source = op.operands[0]
            return self.splat(source) if source.type.rank == 0 else None
        if op.operation.name != "stablehlo.constant" or not isinstance(value.type, ir.RankedTensorType):
            return None
        if value.type.rank and not holds_complex(op) and not op.attributes["value"].is_splat:
            return None
        match = re.match(r"dense<([^\[\]\"]*)> :", constant_text(op))
        return None if match is None else match[1]

    def integer(self, value: ir.Value) -> int | None:
        """The value of a scalar integer or boolean constant, as a number of its type."""
        if not isinstance(value.type, ir.RankedTensorType) or value.type.rank:
            return None
        kind = integer_kind(value.type)
        text = self.splat(value) if kind is not None else None
        if text is None:
            return None
        return {"true": 1, "false": 0}[text] if text in ("true", "false") else int(text, 0)

    def number(self, value: ir.Value) -> float | None:
        """The decimal number of a splat constant; None if there is none."""
        try:
            return float(self.splat(value) or "")
        except ValueError:
            return None

    def integers(self, values: Any) -> list[int] | None:
        """The values of several scalar integer constants; None unless all are."""
        numbers_of: list[int] = []
        for value in values:
            number = self.integer(value)
            if number is None:
                return None
            numbers_of.append(number)
        return numbers_of

    def offsets(self, op: ir.Op) -> list[int]:
        """Where each operand of a concatenate begins, and where the last one ends."""
        if op not in self._offsets:
            dim = int(op.dimension.value)
            sizes = (v.type.shape[dim] for v in op.operands)
            self._offsets[op] = [0, *itertools.accumulate(sizes)]
        return self._offsets[op]


@memoised()
def integer_kind(kind: ir.Type) -> tuple[bool, int] | None:
    """Whether integers of a tensor type are signed, and their bits; None for other elements."""
    match = _INTEGER.fullmatch(str(kind.element_type))
    if match is None:
        return None
    bits = int(match[2])
    return (not match[1] and bits > 1), bits


def numbers(attribute: ir.Attribute) -> list[int]:
    """The elements of an `array<i64: ...>`."""
    return [int(i) for i in ir.DenseI64ArrayAttr(attribute)]


def array(values: Any) -> ir.Attribute:
    """`array<i64: ...>`."""
    return ir.DenseI64ArrayAttr.get(list(values), ir.context())


def is_constant(value: ir.Value) -> bool:
    """Whether it is in the program."""
    op = ir.producer(value)
    return op is not None and op.operation.name == "stablehlo.constant"


def make(
    name: str,
    operands: list[ir.Value],
    kind: ir.Type,
    before: ir.Op,
    attributes: dict[str, ir.Attribute] | None = None,
) -> ir.Value:
    """The result of a new op right before another one, at its place in the user's code."""
    return ir.create(name, operands, [kind], ir.before(before), attributes, before.location).results[0]


def reshaped(value: ir.Value, kind: ir.Type, before: ir.Op) -> ir.Value:
    """`value` in another shape; itself if it has that shape."""
    return value if value.type == kind else make("stablehlo.reshape", [value], kind, before)


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

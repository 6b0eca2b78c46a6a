"""Ops of constants alone: StableHLO's interpreter computes them."""

from __future__ import annotations

import math

from mpmd import ir
from mpmd.passes.cleanup.simplify_stablehlo.facts import Facts, integer_kind, is_constant, make
from mpmd.passes.constants import constant_text
from mpmd.support.memoisation import memoised

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
NAMES = (*_ELEMENTWISE, *_MOVING)


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

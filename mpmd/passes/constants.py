"""Values of constants, as text: the bindings raise for attributes of complex numbers."""

from __future__ import annotations

from mpmd import ir


def holds_complex(op: ir.Op) -> bool:
    """Whether it is a constant op of complex numbers, whose attribute `value` cannot be read."""
    return ir.is_constant(op) and isinstance(op.results[0].type.element_type, ir.ComplexType)


def constant_text(op: ir.Op) -> str:
    """The value of a constant op, as MLIR text: `dense<1.0> : tensor<f32>`."""
    if not holds_complex(op):
        return str(op.attributes["value"])
    text = ir.op_text(op)
    return text[text.index("dense<") :]


def splat(number: str, kind: ir.Type, before: ir.Op) -> ir.Value:
    """A constant of one number, repeated, right before an op."""
    value = ir.Attribute.parse(f"dense<{number}> : {kind}", ir.context())
    made = ir.create("stablehlo.constant", [], [kind], ir.before(before), {"value": value}, before.location)
    return made.results[0]


def zeros(kind: ir.Type, before: ir.Op) -> ir.Value:
    """A constant of zeros, right before an op."""
    element = str(kind.element_type)
    zero = "0.0" if element.startswith(("f", "bf")) else "0"
    return splat("false" if element == "i1" else zero, kind, before)


def attributes_of(op: ir.Op) -> tuple[tuple[str, ir.Attribute | str], ...]:
    """Names and attributes of an op, equal for equal ones; complex numbers as their text."""
    if not holds_complex(op):
        return tuple(op.attributes.items())
    names = [name for name in op.attributes.keys() if name != "value"]  # noqa: SIM118  (it is not a mapping)
    return ("value", constant_text(op)), *((name, op.attributes[name]) for name in names)

"""Questions that passes ask of a module: its calls, regions, constants, and the order of its meshes."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterable
from typing import Any

from mpmd import ir


def called_by(where: ir.Op) -> list[str]:
    """The functions that a function or an op calls, each once."""
    return list(dict.fromkeys(call.callee.value for call in ir.walk(where, ir.FuncCall)))


def reached_from(names: Iterable[str], called: dict[str, list[str]]) -> list[str]:
    """The transitive callees of functions; themselves only if they are recursive.

    Args:
        names: the functions.
        called: the callees of each function of the program.
    """
    reached: dict[str, None] = {}
    todo = [callee for name in names for callee in called[name]]
    while todo:
        current = todo.pop()
        if current not in reached and current in called:
            reached[current] = None
            todo += called[current]
    return list(reached)


def mentions(module: Any, *words: str) -> bool:
    """Whether one of the words is part of a name, an attribute, a type or a location of a module."""
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    return any(word.encode() in code.getvalue() for word in words)


def mesh_order(names: Iterable[str]) -> list[str]:
    """Mesh names, each once: by the numbers at their ends where both have one (m2, m10), else by string."""

    def compare(a: str, b: str) -> int:
        numbers = [re.search(r"\d+$", name) for name in (a, b)]
        keys = [(int(number[0]) if number and all(numbers) else 0) for number in numbers]
        left, right = (keys[0], a), (keys[1], b)
        return (left > right) - (left < right)

    return sorted(sorted(set(names)), key=functools.cmp_to_key(compare))


CONDITIONALS = ("stablehlo.case", "stablehlo.if")


def is_conditional(op: ir.Op) -> bool:
    """Whether it runs one of its regions, as `lax.cond` and `lax.switch` do."""
    return op.operation.name in CONDITIONALS


def around(op: ir.Op) -> list[ir.Op]:
    """The ops in whose regions an op is, innermost first, up to its function."""
    outer: list[ir.Op] = []
    parent = op.operation.parent
    while parent is not None and parent.name != "builtin.module":
        outer.append(parent.opview)
        parent = parent.parent
    return outer


def is_negligible(op: ir.Op) -> bool:
    """Whether it is free to copy: it has no operands and one result."""
    is_small = len(op.operands) == 0 and len(op.results) == 1 and not len(op.operation.regions)
    return is_small and ir.is_duplicable(op)


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
    constant = ir.create(
        "stablehlo.constant", [], [kind], ir.before(before), {"value": value}, before.location
    )
    return constant.results[0]


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

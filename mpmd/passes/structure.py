"""Questions that passes ask of a module: its calls, its regions, the order of its meshes."""

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
    found: dict[str, None] = {}
    todo = [callee for name in names for callee in called[name]]
    while todo:
        current = todo.pop()
        if current not in found and current in called:
            found[current] = None
            todo += called[current]
    return list(found)


def mentions(module: Any, *words: str) -> bool:
    """Whether one of the words is part of a name, an attribute, a type or a location of a module."""
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    return any(word.encode() in code.getvalue() for word in words)


def mesh_order(names: Iterable[str]) -> list[str]:
    """Mesh names, each once: by the numbers at their ends where both have one (m2, m10), else by string."""

    def compare(a: str, b: str) -> int:
        numbers = [re.search(r"\d+$", name) for name in (a, b)]
        keys = [(int(found[0]) if found and all(numbers) else 0) for found in numbers]
        left, right = (keys[0], a), (keys[1], b)
        return (left > right) - (left < right)

    return sorted(sorted(set(names)), key=functools.cmp_to_key(compare))


CONDITIONALS = ("stablehlo.case", "stablehlo.if")


def is_conditional(op: ir.Op) -> bool:
    """Whether it runs one of its regions, as `lax.cond` and `lax.switch` do."""
    return op.operation.name in CONDITIONALS


def around(op: ir.Op) -> list[ir.Op]:
    """The ops in whose regions an op is, innermost first, up to its function."""
    found: list[ir.Op] = []
    parent = op.operation.parent
    while parent is not None and parent.name != "builtin.module":
        found.append(parent.opview)
        parent = parent.parent
    return found

"""The call graph of ordinary calls."""

from __future__ import annotations

from collections.abc import Iterable

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

"""Definitions of a module that another of its definitions uses."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from types import ModuleType


def used_by(module: ModuleType, name: str) -> dict[str, str]:
    """Name -> text of a class, function or table of a module, and of all others that it uses there."""
    parts = _parts(module)
    reached: dict[str, str] = {}
    todo = [name]
    while todo:
        current = todo.pop()
        if current in parts and current not in reached:
            reached[current] = parts[current]
            todo += re.findall(r"\w+", parts[current])
    return reached


@functools.cache
def _parts(module: ModuleType) -> dict[str, str]:
    text = inspect.getsource(module)
    lines = text.splitlines(keepends=True)
    return {
        name: "".join(lines[part.lineno - 1 : part.end_lineno])
        for part in ast.parse(text).body
        for name in _names(part)
    }


def _names(part: ast.stmt) -> list[str]:
    if isinstance(part, ast.ClassDef | ast.FunctionDef):
        return [part.name]
    targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]

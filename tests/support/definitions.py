"""Definitions of a module that another of its definitions uses."""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType


def used_by(module: ModuleType, name: str) -> dict[str, str]:
    """Name -> text of a class, function or table of a module, and of all others that it uses there."""
    text = inspect.getsource(module)
    parts = {
        name: ast.get_source_segment(text, part) or ""
        for part in ast.parse(text).body
        for name in _names(part)
    }
    reached: dict[str, str] = {}
    todo = [name]
    while todo:
        current = todo.pop()
        if current in parts and current not in reached:
            reached[current] = parts[current]
            todo += re.findall(r"\w+", parts[current])
    return reached


def _names(part: ast.stmt) -> list[str]:
    if isinstance(part, ast.ClassDef | ast.FunctionDef):
        return [part.name]
    targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]

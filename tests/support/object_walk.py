"""Every object of `mpmd` that a user meets from some others, through attributes that are public."""

from __future__ import annotations

import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

_METHODS = (types.MethodType, types.FunctionType, types.BuiltinFunctionType)
_MAX_DEPTH = 8


def reached(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Path and object, the first of each class; of containers the first entry."""
    seen: set[type] = set()
    todo = [(name, value, 0) for name, value in roots.items()]
    while todo:
        path, value, depth = todo.pop(0)
        kind = type(value)
        if isinstance(value, Mapping):
            todo += [(f"{path}[{key!r}]", entry, depth + 1) for key, entry in list(value.items())[:1]]
        elif isinstance(value, list | tuple | set | frozenset):
            todo += [(f"{path}[0]", entry, depth + 1) for entry in list(value)[:1]]
        if not kind.__module__.startswith("mpmd") or kind in seen or depth > _MAX_DEPTH:
            continue
        seen.add(kind)
        yield path, value
        for name in dir(value):
            if not name.startswith("_"):
                entry = _attribute(value, name)
                if not isinstance(entry, _METHODS):
                    todo.append((f"{path}.{name}", entry, depth + 1))


def _attribute(value: Any, name: str) -> Any:
    """None where it cannot be read: a property may not apply to this object."""
    try:
        return getattr(value, name)
    except Exception:
        return None


def faults(path: str, value: Any) -> list[str]:
    """What is wrong with the `repr` of an object."""
    begin = time.thread_time()  # the first time, in which nothing is known yet; waiting for a core aside
    text = repr(value)
    took = time.thread_time() - begin
    if repr(value) != text:
        return [f"{path} prints differently each time"]
    lines = text.split("\n")
    found = {
        f"{len(lines)} lines": len(lines) > 10,
        f"{max(map(len, lines))} columns": max(map(len, lines)) > 120,
        "an address": " at 0x" in text,
        f"{took * 1e3:.0f} ms": took > 0.05,
        "nothing": not text.strip(),
    }
    return [
        f"the repr of {path}, a {type(value).__name__}, has {what}" for what, is_so in found.items() if is_so
    ]

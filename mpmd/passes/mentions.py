"""Whether a module says something at all, which is known sooner than where."""

from __future__ import annotations

import io
from typing import Any


def mentions(module: Any, *words: str) -> bool:
    """Whether one of the words is part of a name, an attribute, a type or a location of a module."""
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    return any(word.encode() in code.getvalue() for word in words)

"""Meshes in the order of their names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable


def mesh_order(names: Iterable[str]) -> list[str]:
    """Mesh names, each once: by the numbers at their ends where both have one (m2, m10), else by string."""

    def compare(a: str, b: str) -> int:
        numbers = [re.search(r"\d+$", name) for name in (a, b)]
        keys = [(int(found[0]) if found and all(numbers) else 0) for found in numbers]
        left, right = (keys[0], a), (keys[1], b)
        return (left > right) - (left < right)

    return sorted(sorted(set(names)), key=functools.cmp_to_key(compare))

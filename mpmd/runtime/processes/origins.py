"""Where arrays come from: two processes that fetch one array each must mean the same one.

An array of another process has no data here, and often the shape, the dtype and the mesh of others.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

_RECORDED = 16
"""Calls whose results are known; those of earlier ones are compared by shape, dtype and place only."""


class Origins:
    """The last calls that made arrays, in every process the same; holds none of them."""

    def __init__(self) -> None:
        self._calls: deque[tuple[str, list[weakref.ref[Any] | None]]] = deque(maxlen=_RECORDED)

    def record(self, what: str, leaves: Sequence[Any]) -> None:
        """Notes the results of a call: `what`, such as `program 3`, and its leaves in order."""
        self._calls.append((what, [_reference(leaf) for leaf in leaves]))

    def of(self, leaf: Any) -> list[str]:
        """The calls that gave an array, and which of their results it is; none if that is not known.

        There are several for an array that is two results, or an argument that is a result.
        """
        return list(self._found(leaf))

    def _found(self, leaf: Any) -> Iterator[str]:
        for what, references in reversed(self._calls):
            for k, reference in enumerate(references):
                if reference is not None and reference() is leaf:
                    yield f"result {k} of {what}"


def differ(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the origins of arrays are known, and none is common to both."""
    return bool(one and other) and not set(one) & set(other)


def _reference(leaf: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(leaf)
    except TypeError:  # a number
        return None

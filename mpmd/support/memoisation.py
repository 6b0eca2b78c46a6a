"""Memoisation that can be undone: results for types of deleted programs would accumulate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_caches: list[Any] = []


def memoised(max_results: int = 1 << 12) -> Callable[[_Function], _Function]:
    """Makes a function cache its last results, until `forget_results`.

    Args:
        max_results: how many; by default enough for programs with thousands of values.
    """

    def cached(function: _Function) -> _Function:
        found = functools.lru_cache(max_results)(function)
        _caches.append(found)
        return found  # type: ignore[return-value]

    return cached


def forget_results() -> None:
    """Empties the caches of all memoised functions."""
    for cached in _caches:
        cached.cache_clear()

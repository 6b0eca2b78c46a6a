"""Memoisation that can be undone: results for types of programs that are gone would collect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MAX_RESULTS = 1 << 12
"""Per function: as many as some programs with thousands of values ask for."""

_caches: list[Any] = []


def memoised(function: _Function) -> _Function:
    """A function that remembers its last results, until `forget_results`."""
    cached = functools.lru_cache(_MAX_RESULTS)(function)
    _caches.append(cached)
    return cached  # type: ignore[return-value]


def forget_results() -> None:
    """Empties the caches of all memoised functions."""
    for cached in _caches:
        cached.cache_clear()

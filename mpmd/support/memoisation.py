"""Functions that run once, and results that can be forgotten."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def once(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function run once for given arguments, however many threads call it first.

    `functools.cache` runs a function in every thread that calls it before the first one has finished.
    """
    running = threading.RLock()
    cached: Callable[..., R] = functools.cache(function)

    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with running:
            return cached(*args, **kwargs)

    # calls after the first take no lock
    return cast("Callable[P, R]", functools.cache(functools.wraps(function)(alone)))


_Function = TypeVar("_Function", bound=Callable[..., Any])

_caches: list[Any] = []


def memoised(max_results: int = 1 << 12) -> Callable[[_Function], _Function]:
    """Makes a function cache its last results, until `forget_results`.

    Args:
        max_results: how many; by default enough for programs with thousands of values.
    """

    def cached(function: _Function) -> _Function:
        results = functools.lru_cache(max_results)(function)
        _caches.append(results)
        return results  # type: ignore[return-value]

    return cached


def forget_results() -> None:
    for cached in _caches:
        cached.cache_clear()

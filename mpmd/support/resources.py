"""Resources of the process: cores of threads, reference cycles, objects that native code uses to the end, and
results that are computed once and can be forgotten.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
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


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Runs the block with the calling thread on `cores`; threads that are started in it stay there.

    It has no effect without cores, or where the system has no affinity.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


MIN_AGED = 10_000
"""Objects: fewer are left to the next collection, which takes less than a millisecond."""
MAX_AGED = 1_000_000
"""Objects that may become old without a collection: it bounds the memory of cycles among them."""

_LOCK = threading.Lock()
_inside = 0
_was_enabled = False
_aged = 0


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Pauses the collection of reference cycles, as long as any thread is inside.

    Passes create few cycles but many objects, and each collection traverses everything that JAX holds.  The
    user's setting is restored when the last thread leaves; the objects built until then are old: the
    collections of young objects do not traverse them.
    """
    global _inside, _was_enabled
    with _LOCK:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside and _was_enabled:
                _age()
                gc.enable()


def _age() -> None:
    """Makes all objects old if many are young, or collects after many have become old so.

    To freeze and unfreeze is the way to do so that `gc` has; what the user froze would be unfrozen by it.
    """
    global _aged
    young = gc.get_count()[0]
    if young < MIN_AGED or gc.get_freeze_count():
        return
    _aged += young
    if _aged > MAX_AGED:
        gc.collect()
        _aged = 0
    else:
        gc.freeze()
        gc.unfreeze()


def keep_past_exit(used: Any) -> None:
    """Keeps an object alive until `release` is called, or else until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(used))


def release(used: Any) -> None:
    """Undoes one call of `keep_past_exit`: native code does not use the object any more."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(used))

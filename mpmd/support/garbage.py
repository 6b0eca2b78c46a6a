"""Garbage collection of reference cycles, paused while many objects are built."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()
_inside = 0
_was_enabled = False


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Pauses the collection of reference cycles, as long as any thread is inside.

    Passes create few cycles but many objects, and each collection traverses everything that JAX holds.  The
    user's setting is restored when the last thread leaves.
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
                gc.enable()

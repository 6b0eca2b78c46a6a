"""The search for circles of objects, switched off for as long as somebody builds many objects at once."""

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
    """Without searching for circles of objects, as long as any thread is inside.

    Passes make few such circles but many objects, and each search goes through all that JAX holds: without it
    they take an eighth less time, and one search takes longer than a fragment from the cache.  What the user
    chose is restored when the last one leaves.
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

"""Settings of the C library for memory that fragments free.

A fragment on CPU allocates its results and its scratch space when it starts and frees them when it ends.
glibc maps large blocks from the system and unmaps them when they are freed, so that every fragment of every
step takes a page fault for each 4 KiB that it touches.  With the settings here the same pages serve the next
fragment; the process stays at its peak size.

glibc gives the threads of a process several heaps, and memory that is freed in one is not used by another:
each keeps the peak of its own threads.  `MALLOC_ARENA_MAX=1` in the environment sets one heap; setting that
after JAX has started its threads has no effect.
"""

from __future__ import annotations

import ctypes
import functools

# From <malloc.h>; glibc allows half of a thread's heap at most for the first, and an int for the second.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_BLOCK, _NEVER = 1 << 30, (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Makes this process keep the memory that it frees, from now on; blocks of up to 1 GiB.

    Returns:
        Returns whether the C library supports it: glibc does.

    Source: mallopt(3).
    """
    return _set((_MMAP_THRESHOLD, _MAX_BLOCK), (_TRIM_THRESHOLD, _NEVER))


def _set(*settings: tuple[int, int]) -> bool:
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    library.mallopt.argtypes, library.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return all(library.mallopt(setting, value) == 1 for setting, value in settings)

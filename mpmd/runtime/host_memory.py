"""What the C library does with memory that fragments free.

A fragment on CPU allocates its results and its scratch space when it starts and frees them when it ends.
glibc maps large blocks from the system and unmaps them when they are freed, so that every fragment of every
step takes a page fault for each 4 KiB that it touches: 90,000 faults and 0.2 of 2.4 CPU seconds in a step of
eight transformer layers.  Kept, the same pages serve the next fragment; the process stays at its peak size.

glibc also gives the threads of a process heaps of their own, and what is freed in one serves no other: each
keeps the peak of its own threads, and these do not coincide.  `MALLOC_ARENA_MAX=1` in the environment makes
it one heap; setting that later, when JAX has started its threads, has no measurable effect.
"""

from __future__ import annotations

import ctypes
import functools

# From <malloc.h>; glibc takes at most half of a thread's heap for the first, and an int for the second.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_BLOCK, _NEVER = 1 << 30, (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Has this process keep the memory that it frees, from now on; blocks of up to 1 GiB.

    Returns:
        Whether the C library does that: glibc does, others have policies of their own.

    Source: mallopt(3).
    """
    return _set((_MMAP_THRESHOLD, _MAX_BLOCK), (_TRIM_THRESHOLD, _NEVER))


def _set(*settings: tuple[int, int]) -> bool:
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    library.mallopt.argtypes, library.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return all(library.mallopt(setting, value) == 1 for setting, value in settings)

"""Freed memory of fragments that the C library keeps, and its limit.

A fragment on CPU allocates its results and its scratch space when it starts and frees them when it ends.
glibc maps large blocks from the system and unmaps them when they are freed, so that every fragment of every
step takes a page fault for each 4 KiB that it touches.  If the memory is kept, the same pages serve the next
fragment.  Two thresholds of glibc keep it, and a third one keeps empty heaps of threads, 64 MiB each: glibc
would unmap them, and a fragment whose scratch space is alone in a heap would take page faults in each call.

Unlimited, glibc keeps much more than a step needs: memory freed in the heap of one thread serves no other
threads, an aligned block does not fit where an equal one was, and host arrays freed after they were copied to
their meshes stay as well.  So between steps `FreedMemory.trim` compares the kept memory with a limit, and
returns all of it to the system above the limit: every ten seconds at most, since the next step takes a page
fault for each page again, but at once if twice the limit is kept.  `malloc_trim` returns no memory at the end
of a thread's last heap: so empty heaps are unmapped when they are freed, until the next look.

    kept = growth of (anonymous resident memory - allocated memory) since the last trim

Memory that grows beside malloc counts as kept, too: it causes a trim that returns little, once per limit.
Allocated blocks that were not touched yet hide as much kept memory.
Measurements: docs/decisions/freed-memory.md.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from mpmd.support.resources import once

# From <malloc.h>; glibc allows half of a thread's heap at most for the first, and an int for the second.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MAX_BLOCK, _NEVER = 1 << 30, (1 << 31) - 1

_DEFAULT_PAD, _HEAP_BYTES = 128 << 10, 64 << 20
"""glibc unmaps an empty heap of a thread if so much of the heap before it is free, the top pad: never if that
is the size of a heap."""

_INTERVAL_SECONDS, _CHECK_SHARE = 0.1, 500
"""Reading both sizes takes 0.1 to 10 ms: they are read so often at most, and in 1/500 of the time at most."""

_RETURN_SECONDS, _AT_ONCE = 10.0, 2
"""Kept memory is returned so often at most, unless it is so many times the limit."""

SLACK_SHARE, SLACK_BYTES = 4, 256 << 20
"""Limit of kept memory beside the memory that a step frees itself: 1/4 of its peak, or so many bytes."""


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


class FreedMemory:
    """The memory of this process that was freed and is still resident.  Needs glibc 2.33."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        self._lock = threading.RLock()  # a signal handler may compile, too
        self._limits: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._returned = 0
        self._unmaps_heaps = True
        self._next_check = self._next_return = 0.0
        self._return_all()

    def kept(self) -> int:
        """Bytes that were freed and are resident, from those that changed since the last trim."""
        return max(0, _unallocated_bytes() - self._returned)

    def allow(self, owner: Any, limit: int) -> None:
        """Lets so many bytes be kept while `owner` lives; of several owners the largest limit counts."""
        with self._lock:
            self._limits[owner] = limit

    def trim(self, postpone: bool = False) -> bool:
        """Returns freed memory to the system if more of it is kept than is allowed.

        Looks at most every 0.1 s, and less often where looking takes more than 0.2 ms.  Returns at most every
        10 s, unless twice as much is kept.

        Args:
            postpone: only if twice as much is kept: the step is measured, and its first fragments would show
                the page faults.

        Returns:
            Whether it did.
        """
        now = time.monotonic()
        if now < self._next_check or not self._lock.acquire(blocking=False):  # another thread looks
            return False
        try:
            if self._unmaps_heaps:
                self._returned = min(self._returned, _unallocated_bytes())
                self._unmap_heaps(False)
            kept = self.kept()
            self._next_check = now + max(_INTERVAL_SECONDS, _CHECK_SHARE * (time.monotonic() - now))
            limit = max(self._limits.values(), default=0)
            soon = postpone or now < self._next_return
            if kept <= (_AT_ONCE * limit if soon else limit):
                return False
            self._return_all()
            self._next_return = now + _RETURN_SECONDS
            return True
        finally:
            self._lock.release()

    def _return_all(self) -> None:
        self._unmap_heaps(True)
        self._libc.malloc_trim(0)
        self._returned = _unallocated_bytes()

    def _unmap_heaps(self, unmap: bool) -> None:
        """Whether glibc unmaps the heaps that are empty when a block is freed."""
        self._unmaps_heaps = unmap
        self._libc.mallopt(_TOP_PAD, _DEFAULT_PAD if unmap else _HEAP_BYTES)


@once
def freed_memory() -> FreedMemory | None:
    """Makes this process keep the memory that it frees, from now on; blocks of up to 1 GiB.

    Returns:
        The kept memory; None, and nothing changes, with C libraries other than glibc from 2.33 on: they have
        policies of their own.

    Source: mallopt(3), malloc_trim(3), mallinfo(3).
    """
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallinfo2")):
        return None
    libc.mallopt.argtypes, libc.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    settings = (_MMAP_THRESHOLD, _MAX_BLOCK), (_TRIM_THRESHOLD, _NEVER)
    return FreedMemory(libc) if all(libc.mallopt(*setting) == 1 for setting in settings) else None


def given_out() -> int:
    """Bytes that glibc (2.33 or later) has given out and that were not freed."""
    info = _mallinfo2()()
    return int(info.uordblks + info.hblkhd)


@functools.cache
def _mallinfo2() -> Any:
    """The function of glibc; a library that is opened takes a millisecond."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Mallinfo2
    return function


def limit_of(peak: int, freed: int) -> int:
    """How many bytes may be kept between steps.

    Args:
        peak: the most bytes that a step holds at once.
        freed: how many of them it has freed when it ends: the next step uses their memory again.
    """
    return freed + max(peak // SLACK_SHARE, SLACK_BYTES)


def _unallocated_bytes() -> int:
    """Resident bytes of this process, those of files left out, less those that glibc has given out."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") - given_out()

"""Memory of programs: at cache lines, large blocks in huge pages."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np

_ALIGNMENT = 64
_HUGE = 2 << 20  # bytes of a huge page
_WORTH_HUGE = 1 << 20  # bytes that a huge page must hold, lest most of it be wasted


def aligned_empty(shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
    """An uninitialised array whose memory starts at a cache line, as XLA's buffers do."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def program_memory(size: int) -> np.ndarray:
    """Uninitialised bytes that a program keeps: a workspace or an arena.

    Large ones start at a huge page and ask the system for huge pages where it has them, so that kernels read
    and fetch without a search for each page of 4 KB.

    Raises:
        MemoryError: there is not so much memory.
    """
    if size < _WORTH_HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned_empty((size,), np.uint8)
    pages, rest = divmod(size, _HUGE)
    pages += rest >= _WORTH_HUGE
    try:  # more than is touched: the rest takes addresses alone
        memory = mmap.mmap(-1, size + 2 * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for {size:,} bytes: {error}") from error
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE
    with contextlib.suppress(OSError):  # advice that the system does not take
        memory.madvise(mmap.MADV_HUGEPAGE, start, pages * _HUGE)
    return raw[start : start + size]

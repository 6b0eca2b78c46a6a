"""CPU affinity of the calling thread, and of the threads that it starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence


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

"""On which cores the calling thread, and the threads that it starts, may run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Runs the block with the calling thread on `cores`; threads that are started in it stay there.

    Nothing happens for no cores, or where the system cannot do that.
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

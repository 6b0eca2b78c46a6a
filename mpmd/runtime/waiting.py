"""Waits for arrays on their way: without polling, and so that signals are handled and a step can be stopped.

A thread that looks at an array every 0.3 ms takes the core from a fragment each time: where all cores are
busy, an eighth of its time.  A native wait takes nothing, but Python handles no signal in its main thread
meanwhile.  So a thread of its own makes each wait, which costs 30 us; other threads wait natively themselves.
"""

from __future__ import annotations

import _thread
import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

_CHECK_S = 0.05
"""Pause between the checks of a wait."""

_EXIT_S = 10.0
"""Timeout at exit for waits that were abandoned."""

_waiting: set[threading.Lock] = set()
"""The locks of native waits under way."""


@atexit.register
def _end_waits() -> None:
    """Lets abandoned waits end: a thread that is in XLA when the interpreter ends aborts the process."""
    until = time.monotonic() + _EXIT_S
    for lock in tuple(_waiting):
        lock.acquire(timeout=max(0.0, until - time.monotonic()))


def is_finished(array: Any) -> bool:
    """Whether an array is ready, has failed, or was deleted: donated, and its readers report a failure."""
    return bool(array.is_deleted() or array.is_ready())


def failure_of(array: Any) -> Exception | None:
    """Waits for an array; returns why it has no value, None if it has one or was donated meanwhile."""
    try:
        array.block_until_ready()
    except RuntimeError as error:
        return None if array.is_deleted() else error
    return None


def wait_for(array: Any, check: Callable[[], None] = lambda: None) -> None:
    """Waits until an array is finished; signals are handled at once.

    Args:
        array: an array that may still be computed.
        check: called from time to time; an exception of it ends the wait.
    """
    if is_finished(array):
        return
    lock = _begun()
    _thread.start_new_thread(_wait, (array, lock))  # of `threading`, one costs three times as much
    while not lock.acquire(timeout=_CHECK_S):
        check()


def wait_natively(array: Any) -> None:
    """Waits until an array is finished, in this thread: not for the main one, which must handle signals."""
    if not is_finished(array):
        _wait(array, _begun())


def _begun() -> threading.Lock:
    """The lock of a native wait that begins: it is released when the wait ends."""
    lock = threading.Lock()
    lock.acquire()
    _waiting.add(lock)
    return lock


def _wait(array: Any, lock: threading.Lock) -> None:
    try:
        failure_of(array)
    finally:
        _waiting.discard(lock)
        lock.release()

"""Waits for arrays on their way: without polling, and so that signals are handled and a step can be stopped.

A thread that looks at an array every 0.3 ms takes the core from a fragment each time: where all cores are
busy, an eighth of its time.  A native wait takes nothing, but Python handles no signal in its main thread
meanwhile.  So another thread makes each wait, one that has nothing to wait for or a new one.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import queue
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

_idle: list[_Waiter] = []
"""Threads that have nothing to wait for."""

os.register_at_fork(after_in_child=_idle.clear)


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
    try:
        waiter = _idle.pop()  # in one call: several threads may wait
    except IndexError:
        waiter = _Waiter()
    lock = waiter.begin(array)
    while not lock.acquire(timeout=_CHECK_S):
        check()


class _Waiter:
    """A thread that makes one native wait after the other; it never ends."""

    def __init__(self) -> None:
        self._waits: queue.SimpleQueue[tuple[Any, threading.Lock]] = queue.SimpleQueue()
        _thread.start_new_thread(self._work, ())  # of `threading`, one costs three times as much

    def begin(self, array: Any) -> threading.Lock:
        """Begins to wait for an array; returns the lock that is released at the end."""
        lock = threading.Lock()
        lock.acquire()
        _waiting.add(lock)
        self._waits.put((array, lock))
        return lock

    def _work(self) -> None:
        while True:
            array, lock = self._waits.get()
            with contextlib.suppress(Exception):  # the caller looks at the array
                failure_of(array)
            del array  # it is not held until the next wait
            _idle.append(self)
            _waiting.discard(lock)
            lock.release()

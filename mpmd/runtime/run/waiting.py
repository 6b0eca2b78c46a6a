"""Waits that a signal can interrupt: for arrays on their way, and for work that one thread does at a time.

A thread that looks at an array every 0.3 ms takes the core from a fragment each time: where all cores are
busy, an eighth of its time.  A native wait takes nothing, but Python handles no signal in its main thread
meanwhile.  So another thread makes each wait, one that has nothing to wait for or a new one.

Work of one thread at a time may be interrupted by a signal handler that requests the same work.  A lock that
is not reentrant would make the handler wait for the work that it interrupts, for ever; a reentrant one would
let it change data that this work has half written.  `Exclusive` refuses the handler with an error.
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

from mpmd.errors import ProgramError

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


_CHECK_SECONDS = 0.05
"""Pause between the checks of a thread that waits for another one."""
_OF_XLA = "Dummy-"
"""How Python names the threads that it has not started: XLA runs callbacks in them."""


class Exclusive:
    """A lock that refuses the thread that holds it, and threads of XLA while another one holds it."""

    def __init__(self) -> None:
        self._lock, self._held = threading.RLock(), False

    def work(self, what: str, check: Callable[[], None] = lambda: None) -> ExclusiveWork:
        """Holds the lock for a `with` statement, which waits while another thread does.

        Args:
            what: is done, for messages: `a step of 'train'`.
            check: called from time to time while this waits; an exception of it ends the wait.

        Raises:
            ProgramError: this thread does such work already, in a frame below: this is a signal handler, or a
                callback of a fragment.
        """
        return ExclusiveWork(self, what, check)

    def enter(self, what: str, check: Callable[[], None]) -> None:
        """Takes the lock; see `work`."""
        while not self._lock.acquire(blocking=False):
            if threading.current_thread().name.startswith(_OF_XLA):
                raise ProgramError(_REFUSED.format(what=what, where="a callback of a fragment"))
            if self._lock.acquire(timeout=_CHECK_SECONDS):
                break
            check()
        if self._held:
            self._lock.release()
            raise ProgramError(_REFUSED.format(what=what, where="a signal handler or a callback"))
        self._held = True  # a handler that runs before this line does all of its work before this one's

    def leave(self) -> None:
        """Gives the lock back."""
        self._held = False
        self._lock.release()

    def held_below(self) -> bool:
        """Whether this thread does such work in a frame below the caller's."""
        if not self._lock.acquire(blocking=False):
            return False
        held = self._held
        self._lock.release()
        return held


class ExclusiveWork:
    """The time in which a thread holds the lock; a class, because each step begins one."""

    __slots__ = ("_check", "_lock", "_what")

    def __init__(self, lock: Exclusive, what: str, check: Callable[[], None]) -> None:
        self._lock, self._what, self._check = lock, what, check

    def __enter__(self) -> None:
        self._lock.enter(self._what, self._check)

    def __exit__(self, *exc: object) -> None:
        self._lock.leave()


_REFUSED = (
    "{what} was begun by {where}, which runs while another one is under way\n"
    "  a handler sets a flag, and the loop looks at it between two steps"
)

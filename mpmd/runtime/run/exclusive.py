"""Work of one thread at a time, which a signal handler may interrupt that requests the same.

A lock that is not reentrant would make such a handler wait for the work that it interrupts, for ever; one
that is reentrant would let it change what that work has half done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mpmd.errors import ProgramError

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

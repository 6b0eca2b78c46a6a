"""Arrays that wait to be offered to other processes until they are computed.

JAX's transfer server copies what it serves in a few turns, in the order of the requests, and an array that is
still computed keeps its turn: a message behind it waits, even one that it depends on through another process.
So a thread for each mesh waits for the arrays in the order of the stream, which is that of the device, and
offers only those that are ready.

The receiver of a message that cannot be offered would wait for it: the thread reports it at once, and the
step that sent it raises it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mpmd.errors import TransferError
from mpmd.runtime.waiting import wait_natively

Offer = Callable[[int, Sequence[Any]], None]
Message: TypeAlias = tuple[int, Sequence[Any]]

_CHECK_S = 0.05
"""Pause between the checks of a wait."""


class Outbox:
    """Offers the arrays of one mesh, in order, each once it is computed.

    An array that failed is offered too: its receiver gets the failure.  The thread ends with the outbox, once
    all that it was given is offered, or with the first message that cannot be offered.
    """

    def __init__(self, mesh: str, offer: Offer, report: Callable[[TransferError], None]) -> None:
        """Takes the mesh, the function that offers arrays under a number, and the one that reports a failure.

        Both are called by the thread.
        """
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._put = 0
        self._offered = _Offered(mesh, offer, report)
        work = self._queue, self._offered
        threading.Thread(target=_offer_all, args=work, name=f"mpmd-send-{mesh}", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def put(self, number: int, arrays: Sequence[Any]) -> None:
        """Offers `arrays` under `number` when all of them are computed; returns at once.

        Raises:
            TransferError: an earlier message could not be offered.
        """
        self.check()
        self._put += 1
        self._queue.put((number, arrays))

    def check(self) -> None:
        """Raises the failure of a message that could not be offered."""
        if (failure := self._offered.failure) is not None:
            raise failure

    def wait(self, check: Callable[[], None]) -> None:
        """Returns when all messages are offered.

        Args:
            check: called from time to time; an exception of it ends the wait.

        Raises:
            TransferError: a message could not be offered.
        """
        offered = self._offered
        with offered.changed:
            while offered.count < self._put and offered.failure is None:
                check()
                offered.changed.wait(_CHECK_S)
        self.check()


class _Offered:
    """What the thread of an outbox has done; it does not hold the outbox, which ends it."""

    def __init__(self, mesh: str, offer: Offer, report: Callable[[TransferError], None]) -> None:
        self._mesh, self._offer, self._report = mesh, offer, report
        self.count = 0
        self.failure: TransferError | None = None
        self.changed = threading.Condition()

    def offer(self, number: int, arrays: Sequence[Any]) -> None:
        """Offers arrays once they are computed."""
        for array in arrays:
            wait_natively(array)
        self._offer(number, arrays)
        with self.changed:
            self.count += 1
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Keeps the first failure, and reports it."""
        failure = TransferError(
            f"mesh {self._mesh!r} could not send an array to another process\n"
            f"  {type(error).__name__}: {error}\n"
            "  the processes cannot go on: start all of them again, from a checkpoint"
        )
        failure.__cause__ = error
        with self.changed:
            self.failure = failure
            self.changed.notify_all()
        self._report(failure)


def _offer_all(messages: queue.SimpleQueue[Message | None], offered: _Offered) -> None:
    """Offers messages until there is None, or until one cannot be offered."""
    try:
        while (message := messages.get()) is not None:
            offered.offer(*message)
            del message  # the server holds the arrays until they are pulled
    except Exception as error:
        offered.fail(error)

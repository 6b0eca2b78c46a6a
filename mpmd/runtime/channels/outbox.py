"""Arrays that wait to be offered to other processes until they are computed.

JAX's transfer server copies what it serves in a few turns, in the order of the requests, and an array that is
still computed keeps its turn: a message behind it waits, even one that it depends on through another process.
So a thread for each mesh waits for the arrays in the order of the stream, which is that of the device, and
offers only those that are ready.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mpmd.runtime.waiting import wait_for

Offer = Callable[[int, Sequence[Any]], None]
Message: TypeAlias = tuple[int, Sequence[Any]]


class Outbox:
    """Offers the arrays of one mesh, in order, each once it is computed.

    An array that failed is offered too: its receiver gets the failure.  The thread ends with the outbox, once
    all that it was given is offered.
    """

    def __init__(self, mesh: str, offer: Offer) -> None:
        """Takes the mesh, and the function that offers arrays under a number."""
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._failures: list[Exception] = []
        work = self._queue, offer, self._failures
        threading.Thread(target=_offer_all, args=work, name=f"mpmd-send-{mesh}", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def put(self, number: int, arrays: Sequence[Any]) -> None:
        """Offers `arrays` under `number` when all of them are computed; returns at once.

        Raises:
            Exception: an earlier message could not be offered; its receiver waits for it in vain.
        """
        if self._failures:
            raise self._failures[0]
        self._queue.put((number, arrays))


def _offer_all(messages: queue.SimpleQueue[Message | None], offer: Offer, failures: list[Exception]) -> None:
    """Offers messages until there is None, or until one cannot be offered."""
    try:
        while (message := messages.get()) is not None:
            _offer_computed(*message, offer)
            del message  # the server holds the arrays until they are pulled
    except Exception as error:  # raised by the thread that issues the mesh
        failures.append(error)


def _offer_computed(number: int, arrays: Sequence[Any], offer: Offer) -> None:
    for array in arrays:
        wait_for(array)
    offer(number, arrays)

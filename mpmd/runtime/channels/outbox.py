"""Arrays that wait to be offered to other processes until they are computed.

JAX's transfer server copies what it serves in a few turns, in the order of the requests, and an array that is
still computed keeps its turn: a message behind it waits, even one that it depends on through another process.
So a thread for each mesh waits for the arrays in the order of the stream, which is that of the device, and
offers only those that are ready.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mpmd.runtime.interpreter import failure_of

Offer = Callable[[int, Sequence[Any]], None]


class Outbox:
    """Offers the arrays of one mesh, in order, each once it is computed.

    An array that failed is offered too: its receiver gets the failure.
    """

    def __init__(self, mesh: str, offer: Offer) -> None:
        """Takes the mesh, and the function that offers arrays under a number."""
        self._offer = offer
        self._queue: queue.SimpleQueue[tuple[int, Sequence[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"mpmd-send-{mesh}", daemon=True)
        self._thread.start()

    def put(self, number: int, arrays: Sequence[Any]) -> None:
        """Offers `arrays` under `number` when all of them are computed; returns at once."""
        self._queue.put((number, arrays))

    def _work(self) -> None:
        while True:
            number, arrays = self._queue.get()
            for array in arrays:
                failure_of(array)
            self._offer(number, arrays)
            del arrays  # the server holds them until they are pulled

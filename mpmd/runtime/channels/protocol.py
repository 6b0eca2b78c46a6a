"""The interface of an engine that moves arrays between meshes, and the engine of one process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Stopped(Exception):
    """The step was stopped while an instruction waited for a message."""


class Channel(Protocol):
    """One direction between two meshes, for the length of one step."""

    def send(self, sequence: int, array: Any) -> None:
        """Offers `array` as message `sequence`; never waits for data."""

    def recv(self, sequence: int) -> Any:
        """Returns message `sequence`, which may still be on its way; waits until it has been offered.

        Raises:
            Stopped: `stop` was called.
        """

    def stop(self) -> None:
        """Wakes a receiver that waits; callable from any thread."""


class LocalChannel:
    """One direction between two meshes of this process, for one step.

    The sender starts the copy to the receiver's devices; the queued array may still be on its way.  Messages
    are found by number: those that arrive early are stored.
    """

    def __init__(self, movers: Mapping[int, Callable[[Any], Any]]) -> None:
        """Takes for each message the function that copies its array to the receiver."""
        self._movers = movers
        self._queue: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._early: dict[int, Any] = {}

    def send(self, sequence: int, array: Any) -> None:
        """Starts the copy of `array` and enqueues it."""
        self._queue.put((sequence, self._movers[sequence](array)))

    def recv(self, sequence: int) -> Any:
        """Returns message `sequence`; waits until its send has been issued.

        Raises:
            Stopped: the step was stopped.
        """
        if sequence in self._early:
            return self._early.pop(sequence)
        while (message := self._queue.get()) is not None:
            if message[0] == sequence:
                return message[1]
            self._early[message[0]] = message[1]
        self._queue.put(None)
        raise Stopped

    def stop(self) -> None:
        """Wakes a receiver that waits, now or later."""
        self._queue.put(None)

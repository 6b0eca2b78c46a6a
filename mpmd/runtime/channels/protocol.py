"""The interface of an engine that moves arrays between meshes.

A receive is paired with its send by number, any number of messages may wait, and a sent buffer may be
consumed while its message is on its way, unless the meshes are in different processes.
"""

from __future__ import annotations

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

"""The interface of an engine that moves arrays between meshes, and its guarantees."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelProperties:
    """Guarantees of an engine; they decide which checks a program must pass.

    Attributes:
        pairing: "tagged" pairs a receive with its send by number, "fifo" by order on the channel.
        sender_may_donate: whether a sent buffer may be consumed afterwards while the message is on its way.
        receiver_pulls: whether bytes move only when the receive is issued; then receives are issued early.
        capacity: messages that may wait in a channel before a send blocks, None for any number.
    """

    pairing: Literal["tagged", "fifo"] = "tagged"
    sender_may_donate: bool = True
    receiver_pulls: bool = False
    capacity: int | None = None


IN_PROCESS = ChannelProperties()
BETWEEN_PROCESSES = ChannelProperties(sender_may_donate=False, receiver_pulls=True)
"""Of `channels.remote`: a sent buffer is read when the receiver pulls it, and its end is not reported."""


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

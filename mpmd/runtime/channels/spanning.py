"""Messages of meshes that are over several processes.

Every process of the sending mesh has some of an array, and every process of the receiving mesh needs some.
`reshard` plans the pieces between their devices.  Those between devices of one process are copied there; all
others are offered, for each pair of processes under a number of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from mpmd.jax_calls import array_copier
from mpmd.jax_compat import default_memory_kind
from mpmd.runtime.channels.links import Links
from mpmd.runtime.channels.protocol import LocalChannel
from mpmd.runtime.channels.reshard import (
    Box,
    ShardPiece,
    assembler,
    assembling,
    boxes,
    reshard_pieces,
    slice_of,
    to_default_memory,
)

Shards = Mapping[Any, jax.Array]
"""The parts of an array on the devices of this process, by device."""


@dataclasses.dataclass(frozen=True)
class PieceTransfers:
    """The pieces between two shardings, each from a device to a device.

    Attributes:
        sources, targets: the devices of both shardings.
        boxes: of the array that each target device needs.
        pieces: for each target device those that its box consists of.
    """

    sources: Sequence[Any]
    targets: Sequence[Any]
    boxes: Sequence[Box]
    pieces: Sequence[Sequence[ShardPiece]]

    @staticmethod
    def of(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> PieceTransfers:
        """A piece comes from a device of the process that needs it, if one has it."""
        sources, held = boxes(source, shape)
        targets, wanted = boxes(target, shape)

        def near(sender: int, receiver: int) -> bool:
            return bool(sources[sender].process_index == targets[receiver].process_index)

        of_targets = reshard_pieces(held, wanted, near).targets
        return PieceTransfers(sources, targets, wanted, [pieces for _, pieces in of_targets])

    def between(self, sender: int, receiver: int) -> list[tuple[Any, ShardPiece]]:
        """The pieces that a process sends to another, or to itself, each with the device that needs it."""
        return [
            (device, piece)
            for device, pieces in zip(self.targets, self.pieces, strict=True)
            for piece in pieces
            if device.process_index == receiver and self.sources[piece.source].process_index == sender
        ]


class SpanningMessage:
    """One message, as one process sees it.

    Attributes:
        keep: copies the pieces that stay in this process to their devices; None if there are none.
        offers: for each other receiver its number, and the function that slices its pieces.
        pulls: for each other sender its index, the number, and the types of its pieces.
    """

    def __init__(self, source: Sharding, target: Sharding, kind: Any, number: int, here: int) -> None:
        """Plans the part of process `here`; the numbers begin at `number`, one for each pair of processes."""
        shape, self._dtype = kind.shape, np.dtype(kind.dtype)
        self._shape, self._target = shape, target
        senders, receivers = processes_of(source), processes_of(target)
        transfers = PieceTransfers.of(source, target, shape)
        self._take = {
            device: to_default_memory(SingleDeviceSharding(device, memory_kind=source.memory_kind))
            for device in source.device_set
            if device.process_index == here
        }
        self.keep: Callable[[Shards], list[jax.Array]] | None = None
        self.offers: list[tuple[int, Callable[[Shards], list[jax.Array]]]] = []
        self.pulls: list[tuple[int, int, list[jax.ShapeDtypeStruct]]] = []
        order: list[tuple[Any, ShardPiece]] = []  # of the pieces as they are received
        for s, sender in enumerate(senders):
            for r, receiver in enumerate(receivers):
                pieces = transfers.between(sender, receiver)
                if not pieces or not self.has_elements or here not in (sender, receiver):
                    continue
                pair = number + s * len(receivers) + r
                if receiver != here:
                    self.offers.append((pair, self._slices(transfers, pieces, copied=False)))
                elif sender != here:
                    self.pulls.append((sender, pair, [self._type(device, p) for device, p in pieces]))
                else:
                    self.keep = self._slices(transfers, pieces, copied=True)
        if self.keep is not None:
            order += transfers.between(here, here)
        for sender, _, _ in self.pulls:
            order += transfers.between(sender, here)
        self._shard_makers = self._makers(transfers, order, here)

    @property
    def has_elements(self) -> bool:
        """Whether there is anything to send."""
        return 0 not in self._shape

    def shards(self, array: jax.Array) -> Shards:
        """The parts of the sent array that are in this process, in the default memory of their devices."""
        return {shard.device: self._take[shard.device](shard.data) for shard in array.addressable_shards}

    def joined(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The received array, from the pieces that stayed here and those of `pulls`, in this order."""
        if not self.has_elements:
            empty = np.zeros(self._shape, self._dtype)
            return jax.make_array_from_callback(self._shape, self._target, lambda index: empty[index])
        with assembling():
            shards = [make(parts) for make in self._shard_makers]
        return jax.make_array_from_single_device_arrays(self._shape, self._target, shards)

    def _type(self, device: Any, piece: ShardPiece) -> jax.ShapeDtypeStruct:
        shape = tuple(end - start for start, end in piece.box)
        return jax.ShapeDtypeStruct(shape, self._dtype, sharding=SingleDeviceSharding(device))

    def _slices(
        self, transfers: PieceTransfers, pieces: Sequence[tuple[Any, ShardPiece]], *, copied: bool
    ) -> Callable[[Shards], list[jax.Array]]:
        """The function that slices pieces on their devices, and copies them to those that need them."""
        slices = [(transfers.sources[piece.source], slice_of(piece)) for _, piece in pieces]
        places = [array_copier(SingleDeviceSharding(device)) for device, _ in pieces]

        def sliced(shards: Shards) -> list[jax.Array]:
            with jax.enable_x64(True):
                sliced_shards = [slice_(shards[device]) for device, slice_ in slices]
            return (
                [place(part) for place, part in zip(places, sliced_shards, strict=True)]
                if copied
                else sliced_shards
            )

        return sliced

    def _makers(
        self, transfers: PieceTransfers, order: Sequence[tuple[Any, ShardPiece]], here: int
    ) -> list[Callable[[Sequence[jax.Array]], jax.Array]]:
        """For each device of this process the function that assembles its part from the received pieces."""
        position = {(device, piece.box): k for k, (device, piece) in enumerate(order)}
        makers = []
        for device, box, pieces in zip(transfers.targets, transfers.boxes, transfers.pieces, strict=True):
            if device.process_index == here and self.has_elements:
                at = [position[device, piece.box] for piece in pieces]
                makers.append(_maker(device, box, pieces, at, self._target))
        return makers


def _maker(
    device: Any, box: Box, pieces: Sequence[ShardPiece], at: Sequence[int], target: Sharding
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """The function that assembles the part of one device, from the pieces at some positions."""
    default = default_memory_kind(target)
    finish: Callable[[jax.Array], jax.Array] = lambda part: part  # noqa: E731
    if target.memory_kind not in (None, default):
        finish = array_copier(SingleDeviceSharding(device, memory_kind=target.memory_kind))
    if len(pieces) == 1 and pieces[0].box == box:
        return lambda parts: finish(parts[at[0]])
    starts = tuple(tuple(a - base for (a, _), (base, _) in zip(p.box, box, strict=True)) for p in pieces)
    assemble = assembler(tuple(end - start for start, end in box), starts)
    return lambda parts: finish(assemble(*[parts[k] for k in at]))


def processes_of(sharding: Sharding) -> list[int]:
    return sorted({device.process_index for device in sharding.device_set})


class SpanningMessages(dict[int, SpanningMessage]):
    """The messages of one channel, by number."""


class SpanningChannel:
    """One direction between two meshes, one of them over several processes, for one step."""

    def __init__(
        self,
        links: Links,
        mesh: str,
        messages: Mapping[int, SpanningMessage],
        number: Callable[[int], int],
    ) -> None:
        """Takes the sending mesh, the messages, and the numbers of a step."""
        self._links, self._mesh = links, mesh
        self._messages, self._number = messages, number
        self._within = LocalChannel({k: m.keep for k, m in messages.items() if m.keep is not None})

    def send(self, sequence: int, array: jax.Array) -> None:
        """Offers the pieces of other processes, and copies this one's; they may still be computed."""
        message = self._messages[sequence]
        shards = message.shards(array)
        for number, pieces in message.offers:
            self._links.send(self._mesh, self._number(number), pieces(shards))
        if message.keep is not None:
            self._within.send(sequence, shards)

    def recv(self, sequence: int) -> jax.Array:
        """Message `sequence`; waits until this process has issued its own part of the send."""
        message = self._messages[sequence]
        parts = list(self._within.recv(sequence)) if message.keep is not None else []
        for sender, number, types in message.pulls:
            parts += self._links.pull(sender, self._number(number), types)
        return message.joined(parts)

    def stop(self) -> None:
        self._within.stop()

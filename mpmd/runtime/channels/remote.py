"""Messages between meshes of different processes.

On GPUs, arrays that lie alike on both meshes are sent directly: see `direct`.  All others go by the transfer
server: an array whose shards are equal on both meshes whole, shard to shard, any other as the pieces that
`reshard` plans, which the sender slices and the receiver assembles.  An array is offered when the call that
computes it is issued, and the server keeps a reference to it until the receiver has pulled it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mpmd import jax_calls, jax_compat, jax_distributed
from mpmd.errors import ProgramError
from mpmd.runtime.channels.direct import DirectChannel, DirectPairs, MessageEnds, direct_messages
from mpmd.runtime.channels.links import MESSAGE_BITS, Links, message_number
from mpmd.runtime.channels.mesh_devices import LocalChannels, MeshDevices, has_parts_for
from mpmd.runtime.channels.protocol import Channel
from mpmd.runtime.channels.reshard import (
    ReshardPieces,
    assembler,
    assembling,
    boxes,
    reshard_pieces,
    slice_of,
    to_default_memory,
)
from mpmd.runtime.channels.spanning import SpanningChannel, SpanningMessage, SpanningMessages
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.pairs import MessageKey
from mpmd.runtime.program.streams import Program, Send


@dataclasses.dataclass(frozen=True)
class RemoteMessage:
    """How a message leaves one process and arrives in another.

    Attributes:
        number: its place among all messages of a step.
        split: the arrays that are offered.
        types: of the arrays that are pulled; there are none for an array without elements.
        join: the array of the receiver.
    """

    number: int
    split: Callable[[jax.Array], Sequence[jax.Array]]
    types: tuple[jax.ShapeDtypeStruct, ...]
    join: Callable[[Sequence[jax.Array]], jax.Array]


class RemoteChannel:
    """One direction between meshes of two processes, for one step; this process has one of them."""

    def __init__(
        self,
        links: Links,
        sender: int,
        mesh: str,
        messages: Mapping[int, RemoteMessage],
        number: Callable[[int], int],
    ) -> None:
        """Takes the sending process and mesh, the messages, and the numbers of this step."""
        self._links, self._sender, self._mesh = links, sender, mesh
        self._messages, self._number = messages, number

    def send(self, sequence: int, array: jax.Array) -> None:
        """Offers `array`, which may still be computed."""
        message = self._messages[sequence]
        if message.types:
            self._links.send(self._mesh, self._number(message.number), message.split(array))

    def recv(self, sequence: int) -> jax.Array:
        """RemoteMessage `sequence`, which may not have been sent yet."""
        message = self._messages[sequence]
        if not message.types:
            return message.join(())
        return message.join(self._links.pull(self._sender, self._number(message.number), message.types))

    def stop(self) -> None:
        """Nothing waits here: arrays that do not arrive fail when the connections are poisoned."""


class WorldDevices(MeshDevices):
    """The devices of every mesh in a world of several processes; arrays are placed on this process's only."""

    def __init__(
        self,
        meshes: Mapping[str, Mesh],
        processes: Mapping[str, tuple[int, ...]],
        links: Links,
        transfers: str = "auto",
    ) -> None:
        """Takes the meshes, for each the indices of its processes, the connections, and which way to send."""
        super().__init__(meshes)
        self._processes, self._links, self._transfers = dict(processes), links, transfers
        self._process = jax.process_index()

    def paired(self, program: Program) -> Collection[MessageKey]:
        """The messages that are sent directly.

        Raises:
            ConfigError: all must be, by the user's choice, and some cannot be.
        """
        messages = direct_messages(self._ends(program), self._transfers)
        if self._process == 0:
            messages.warn()
        return messages.keys

    def _ends(self, program: Program) -> Iterator[MessageEnds]:
        for channel, sequence, source in _sent(program):
            target = program.channels[channel].types[sequence]
            if channel in program.between_processes and 0 not in target.shape:
                yield MessageEnds((channel, sequence), source, target, *map(self.sharding, (source, target)))

    def channels(self, program: Program, pairs: Sequence[MessageKey] = ()) -> Callable[[], Sequence[Channel]]:
        """The function that creates the channels of each step.

        All processes must call it for the same programs, in the same order.

        Raises:
            ProgramError: the program has too many messages.
        """
        make = self._server_channels(program)
        if not pairs:
            return make
        ends = {end.key: end for end in self._ends(program)}
        direct = DirectPairs([ends[key].pair(_aval(ends[key].source, False), self._process) for key in pairs])

        def with_pairs() -> list[Channel]:
            step = direct.step()
            return [DirectChannel(n, step, direct.position, other) for n, other in enumerate(make())]

        return with_pairs

    def _server_channels(self, program: Program) -> Callable[[], list[Channel]]:
        number = self._links.next_program()
        local = LocalChannels(self, program, self._own_channels(program))
        messages = self._messages(program)
        steps = itertools.count()

        def make() -> list[Channel]:
            step = next(steps)
            self._links.world.begin(f"step {step} of program {number}")

            def number_of(message: int) -> int:
                return message_number(number, step, message)

            channels: list[Channel] = []
            for at, (channel, within) in enumerate(zip(program.channels, local(), strict=True)):
                if at not in messages:
                    channels.append(within)
                    continue
                mesh, of_channel = channel.source, messages[at]
                if isinstance(of_channel, SpanningMessages):
                    channels.append(SpanningChannel(self._links, mesh, of_channel, number_of))
                    continue
                (sender,) = self._processes[mesh]
                channels.append(RemoteChannel(self._links, sender, mesh, of_channel, number_of))
            return channels

        return make

    def can_place(self, value: Any, mesh: str) -> bool:
        """Whether this process has what its devices of a mesh need of an argument, or what moves it there."""
        return has_parts_for(value, NamedSharding(self.meshes[mesh], PartitionSpec()))

    def absent(self, type_: BufferType, weak_type: bool) -> Callable[[], jax.Array]:
        """The function that makes the array of a result that another process holds."""
        return jax_distributed.absent_array_maker(_aval(type_, weak_type), self.sharding(type_))

    def _own_channels(self, program: Program) -> frozenset[int]:
        """The channels both of whose meshes are in this process."""
        ends = [{*self._processes[c.source], *self._processes[c.target]} for c in program.channels]
        return frozenset(k for k, end in enumerate(ends) if end == {self._process})

    def _messages(self, program: Program) -> dict[int, dict[int, RemoteMessage] | SpanningMessages]:
        """The messages of every channel between processes that ends here."""
        sources = {(channel, sequence): source for channel, sequence, source in _sent(program)}
        by_stream: dict[int, dict[int, RemoteMessage] | SpanningMessages] = {}
        count = 0
        for number, channel in enumerate(program.channels):
            senders, receivers = self._processes[channel.source], self._processes[channel.target]
            if len({*senders, *receivers}) == 1:
                continue
            pairs = len(senders) * len(receivers)
            if self._process in (*senders, *receivers) and pairs == 1:
                by_stream[number] = {
                    k: self._message(count + k, sources[number, k], target)
                    for k, target in enumerate(channel.types)
                }
            elif self._process in (*senders, *receivers):
                by_stream[number] = SpanningMessages(
                    (k, self._spanning(count + k * pairs, sources[number, k], target))
                    for k, target in enumerate(channel.types)
                )
            count += len(channel.types) * pairs
        if count >= 1 << MESSAGE_BITS:
            raise ProgramError(f"a step has {count} messages between processes; {1 << MESSAGE_BITS} fit")
        return by_stream

    def _spanning(self, number: int, source: BufferType, target: BufferType) -> SpanningMessage:
        return SpanningMessage(self.sharding(source), self.sharding(target), target, number, self._process)

    def _message(self, number: int, source: BufferType, target: BufferType) -> RemoteMessage:
        here, there = self.sharding(source), self.sharding(target)
        shape, dtype = target.shape, np.dtype(target.dtype)
        finish = _into_memory(there)
        there = _in_default_memory(there)
        if 0 in shape:
            return RemoteMessage(number, lambda array: (), (), lambda _: _zeros(shape, dtype, there, finish))
        gather = to_default_memory(here)
        source_devices, held = boxes(here, shape)
        target_devices, wanted = boxes(there, shape)
        if held == wanted:
            kind = jax.ShapeDtypeStruct(shape, dtype, sharding=there)
            return RemoteMessage(number, lambda array: [gather(array)], (kind,), lambda got: finish(got[0]))
        pieces_of = reshard_pieces(held, wanted)
        types = tuple(
            jax.ShapeDtypeStruct(
                tuple(end - start for start, end in piece.box), dtype, sharding=SingleDeviceSharding(device)
            )
            for device, (_, pieces) in zip(target_devices, pieces_of.targets, strict=True)
            for piece in pieces
        )
        return RemoteMessage(
            number,
            _splitter(pieces_of, source_devices, gather),
            types,
            _joiner(pieces_of, shape, there, finish),
        )


def _sent(program: Program) -> Iterator[tuple[int, int, BufferType]]:
    """Every message: its channel, its number there, and the type of the sent buffer."""
    for stream in program.streams:
        for op in stream.instructions:
            if isinstance(op, Send):
                yield op.channel, op.sequence, stream.buffers[op.buffer].type


@functools.cache
def _aval(type_: BufferType, weak_type: bool) -> jax_compat.ShapedArray:
    return jax_compat.ShapedArray(type_.shape, np.dtype(type_.dtype), weak_type=weak_type)


def _in_default_memory(sharding: Sharding) -> Sharding:
    return sharding.with_memory_kind(jax_compat.default_memory_kind(sharding))


def _into_memory(target: Sharding) -> Callable[[jax.Array], jax.Array]:
    """Copies an array from the default memory of its devices to a sharding's, if it is another."""
    if target.memory_kind in (None, jax_compat.default_memory_kind(target)):
        return lambda array: array
    return jax_calls.array_copier(target)


def _zeros(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding, finish: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    with jax.enable_x64(True):
        return finish(jnp.zeros(shape, dtype, device=sharding))


def _splitter(
    pieces_of: ReshardPieces, devices: Sequence[Any], gather: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array], list[jax.Array]]:
    """The function that slices all pieces of an array, by target device."""
    slices = [(devices[p.source], slice_of(p)) for _, pieces in pieces_of.targets for p in pieces]

    def split(array: jax.Array) -> list[jax.Array]:
        by_device = {shard.device: shard.data for shard in gather(array).addressable_shards}
        with jax.enable_x64(True):
            return [slice_(by_device[device]) for device, slice_ in slices]

    return split


def _joiner(
    pieces_of: ReshardPieces,
    shape: tuple[int, ...],
    sharding: Sharding,
    finish: Callable[[jax.Array], jax.Array],
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """The function that assembles an array from its pieces on the devices of the receiver."""
    assemble: list[tuple[int, Callable[..., jax.Array]]] = []
    for box, pieces in pieces_of.targets:
        starts = tuple(
            tuple(a - base for (a, _), (base, _) in zip(piece.box, box, strict=True)) for piece in pieces
        )
        whole = len(pieces) == 1 and pieces[0].box == box
        size = tuple(end - start for start, end in box)
        assemble.append((len(pieces), _only if whole else assembler(size, starts)))

    def join(parts: Sequence[jax.Array]) -> jax.Array:
        joined, start = [], 0
        with assembling():
            for count, make in assemble:
                joined.append(make(*parts[start : start + count]))
                start += count
        return finish(jax.make_array_from_single_device_arrays(shape, sharding, joined))

    return join


def _only(part: jax.Array) -> jax.Array:
    return part

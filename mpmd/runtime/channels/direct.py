"""Messages between processes by the call behind `jax.device_put`: from device to device, on GPUs by NCCL.

Both ends make the same call: the sender with its array, the receiver with one of the same type without data
here.  JAX numbers these calls in every process, and NCCL pairs sends and receives by their order.
So every process makes the calls of all pairs of a program in the order of `pairs`, also of those between
others.

It is for arrays whose devices are of one kind at both ends, with the same HLO sharding: device k sends its
part to device k.  All others go by the transfer server; see `links`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from mpmd import jax_calls, jax_compat, jax_distributed
from mpmd.errors import ConfigError, ProgramError
from mpmd.runtime.channels.protocol import Channel
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.pairs import MessageKey

Copy = Callable[[Any], Any]
_SHOWN = 8
"""Lines that a message lists at most."""


@dataclasses.dataclass(frozen=True)
class DirectPair:
    """A message, as one process sees it.

    Attributes:
        key: of the message.
        sends, receives: whether this process has an end.
        prepare: a function of the sender's array, before the call.
        absent: an array of the sent type without data here; not used by the sender.
        copy: the call.
    """

    key: MessageKey
    sends: bool
    receives: bool
    prepare: Copy
    absent: Callable[[], Any]
    copy: Copy


class DirectPairs:
    """The pairs of a program, in their order."""

    def __init__(self, pairs: Sequence[DirectPair]) -> None:
        self.pairs = tuple(pairs)
        self.position: Mapping[MessageKey, int] = {pair.key: k for k, pair in enumerate(self.pairs)}
        own = [k for k, pair in enumerate(self.pairs) if pair.sends or pair.receives]
        self.last = own[-1] if own else -1

    def step(self) -> DirectStep:
        new_step = DirectStep(self)
        if self.last < 0:
            new_step.count(len(self.pairs))
        return new_step


class DirectStep:
    """The calls of one step: as far as they have been made."""

    def __init__(self, of: DirectPairs) -> None:
        self._of, self._next = of, 0

    def send(self, key: MessageKey, array: Any) -> None:
        pair = self._reach(key)
        pair.copy(pair.prepare(array))
        self._passed(key)

    def recv(self, key: MessageKey) -> Any:
        """Makes the call of a message; its array, which is on its way."""
        pair = self._reach(key)
        array = pair.copy(pair.absent())
        self._passed(key)
        return array

    def count(self, until: int) -> None:
        """Makes the calls of other processes' pairs up to a position.

        Raises:
            ProgramError: an end of this process was left out.
        """
        for pair in self._of.pairs[self._next : until]:
            if pair.sends or pair.receives:
                raise ProgramError(f"message {pair.key} must be issued before those that follow it")
            pair.copy(pair.absent())
        self._next = until

    def _reach(self, key: MessageKey) -> DirectPair:
        at = self._of.position[key]
        if at < self._next:
            raise ProgramError(f"message {key} must be issued before those that follow it")
        self.count(at)
        return self._of.pairs[at]

    def _passed(self, key: MessageKey) -> None:
        self._next = self._of.position[key] + 1
        if self._next > self._of.last:
            self.count(len(self._of.pairs))


class DirectChannel:
    """One direction between two meshes for a step: pairs, and other messages by another engine."""

    def __init__(
        self, number: int, step: DirectStep, messages: Mapping[MessageKey, int], other: Channel
    ) -> None:
        """Takes its number, the step, the pairs, and the channel of all others."""
        self._number, self._step, self._pairs, self._other = number, step, messages, other

    def send(self, sequence: int, array: Any) -> None:
        """Offers `array`."""
        if (self._number, sequence) in self._pairs:
            self._step.send((self._number, sequence), array)
        else:
            self._other.send(sequence, array)

    def recv(self, sequence: int) -> Any:
        """Message `sequence`, which may be on its way."""
        if (self._number, sequence) in self._pairs:
            return self._step.recv((self._number, sequence))
        return self._other.recv(sequence)

    def stop(self) -> None:
        self._other.stop()


@dataclasses.dataclass(frozen=True)
class MessageEnds:
    """A message between processes, and where it is at both ends."""

    key: MessageKey
    source: BufferType
    target: BufferType
    here: Sharding
    there: Sharding

    def pair(self, aval: Any, process: int) -> DirectPair:
        """It as a process sees it; `aval` is the type of the sent array."""
        make = jax_distributed.absent_array_maker(aval, self.here)
        known: list[jax.Array] = []

        def absent() -> jax.Array:
            if not known:
                known.append(make())
            return known[0]

        sends, receives = (_is_in(end, process) for end in (self.here, self.there))
        prepare = jax_calls.in_order(len(aval.shape)) if sends else _nothing
        return DirectPair(self.key, sends, receives, prepare, absent, jax_calls.array_copier(self.there))


def _is_in(sharding: Sharding, process: int) -> bool:
    return any(device.process_index == process for device in sharding.device_set)


def _nothing(array: Any) -> Any:
    raise AssertionError("another process sends this")


def why_not_direct(source: Sharding, target: Sharding, rank: int) -> str:
    """Why arrays of a sharding cannot be sent to another directly; "" if they can."""
    ends = source, target
    platforms = [next(iter(end.device_set)).platform for end in ends]
    kinds = [sorted({device.device_kind for device in end.device_set}) for end in ends]
    processes = [{device.process_index for device in end.device_set} for end in ends]
    if not jax_distributed.copies_between_processes(platforms[0]):
        return (
            f"this version of JAX does not copy arrays between {platforms[0].upper()}s of different processes"
        )
    if kinds[0] != kinds[1] or len(kinds[0]) > 1:
        return f"their devices are {', '.join(kinds[0])} and {', '.join(kinds[1])}"
    if processes[0] & processes[1]:
        return "both meshes have devices in one process"
    if any(end.memory_kind not in (None, jax_compat.default_memory_kind(end)) for end in ends):
        return "one of them is not in the memory of its devices"
    if not jax_distributed.same_hlo_sharding(source, target, rank):
        return "they are sharded differently"
    return ""


@dataclasses.dataclass(frozen=True)
class DirectMessages:
    """Which messages of a program are sent directly.

    Attributes:
        keys: of those that are.
        others: why others are not, though they are of GPUs, each with the meshes and their number.
    """

    keys: frozenset[MessageKey]
    others: Mapping[tuple[str, str, str], int] = dataclasses.field(default_factory=dict)

    def warn(self) -> None:
        """Names those that are not."""
        if self.others:
            warnings.warn(
                "arrays of GPUs that are sent through the host, by JAX's transfer server:\n"
                f"{_listing(self.others)}\n"
                "  RuntimeOptions(transfers='server') sends all of them so, without this warning",
                UserWarning,
                stacklevel=2,
            )


def direct_messages(ends: Iterable[MessageEnds], transfers: str) -> DirectMessages:
    """Which messages are sent directly; the same in all processes.

    Args:
        ends: of all messages between processes.
        transfers: the user's choice, see `RuntimeOptions`.

    Raises:
        ConfigError: the choice is `device_put`, and some cannot be.
    """
    if transfers == "server":
        return DirectMessages(frozenset())
    direct, others = set[MessageKey](), dict[tuple[str, str, str], int]()
    for end in ends:
        on_gpus = {device.platform for device in end.here.device_set | end.there.device_set} == {"gpu"}
        if transfers == "auto" and not on_gpus:
            continue
        why = why_not_direct(end.here, end.there, len(end.target.shape))
        if not why and transfers == "auto" and not one_device_each(end.here, end.there):
            why = "a process has several GPUs"
        if why:
            kind = end.source.mesh, end.target.mesh, why
            others[kind] = others.get(kind, 0) + 1
        else:
            direct.add(end.key)
    if others and transfers == "device_put":
        raise ConfigError(
            f"transfers is 'device_put', but not all arrays can be sent so:\n{_listing(others)}\n"
            "  use 'auto', which sends these by JAX's transfer server, or meshes that are alike"
        )
    return DirectMessages(frozenset(direct), others)


def _listing(others: Mapping[tuple[str, str, str], int]) -> str:
    lines = [
        f"  {count} message{'s' * (count > 1)} a step from mesh {source!r} to mesh {target!r}: {why}"
        for (source, target, why), count in others.items()
    ]
    return "\n".join([*lines[:_SHOWN], *([f"  and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN))])


def one_device_each(source: Sharding, target: Sharding) -> bool:
    """Whether every process of both ends has one device only."""
    own = source.device_set | target.device_set
    processes = {device.process_index for device in own}
    client_devices = next(iter(own)).client.devices()
    return sum(device.process_index in processes for device in client_devices) == len(processes)

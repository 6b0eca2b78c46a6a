"""Moves an array between meshes of any size and sharding without waiting for it to be computed.

`jax.device_put` from one sharding to another of a different shape waits for the array.  Here the move is
planned once, from the boxes of the array that each device holds, as calls that do not wait: slices on the
source's devices, copies between single devices, and an assembly on the target's devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from mpmd.jax_calls import array_copier, execution_order
from mpmd.jax_compat import default_memory_kind

Box = tuple[tuple[int, int], ...]
"""Per dim the start and the end of a part of a global array."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardPiece:
    """The part `box` of the array, sliced from the shard `shard` that source device number `source` holds."""

    source: int
    shard: Box
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class ReshardPieces:
    """For each target device its box, and disjoint pieces that cover it."""

    targets: tuple[tuple[Box, tuple[ShardPiece, ...]], ...]


def reshard_pieces(
    source: Sequence[Box],
    target: Sequence[Box],
    near: Callable[[int, int], bool] = lambda source, target: True,
) -> ReshardPieces:
    """Pieces from the boxes on the source devices, in device order, to those on the target devices.

    Where several source devices hold one box, its readers are spread over those that are `near` the reader,
    if there are any.  A box without elements has an empty piece, for its type.
    """
    holders: dict[Box, list[int]] = {}
    for device, box in enumerate(source):
        holders.setdefault(box, []).append(device)
    turns = dict.fromkeys(holders, 0)
    targets = []
    for reader, wanted in enumerate(target):
        pieces = []
        for box, devices in holders.items():
            part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, wanted, strict=True))
            if all(start < end for start, end in part):
                close = [device for device in devices if near(device, reader)] or devices
                pieces.append(ShardPiece(close[turns[box] % len(close)], box, part))
                turns[box] += 1
        if not pieces:
            box, devices = next(iter(holders.items()))
            pieces.append(ShardPiece(devices[0], box, tuple((start, start) for start, _ in box)))
        targets.append((wanted, tuple(pieces)))
    return ReshardPieces(tuple(targets))


def boxes(sharding: Sharding, shape: tuple[int, ...]) -> tuple[list[Any], list[Box]]:
    """The devices of a sharding in its order, and the box of the array that each holds."""
    devices, held = [], []
    for device, index in sharding.devices_indices_map(shape).items():
        devices.append(device)
        held.append(tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True)))
    return devices, held


def resharder(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    """A function that copies an array of `shape` from `source` to `target`."""
    source_devices, held = boxes(source, shape)
    target_devices, wanted = boxes(target, shape)
    pieces_of = reshard_pieces(held, wanted)
    gather = to_default_memory(source)
    deliver = [
        _shard_maker(box, pieces, device, target)
        for (box, pieces), device in zip(pieces_of.targets, target_devices)
    ]

    def reshard(array: jax.Array) -> jax.Array:
        by_device = {shard.device: shard.data for shard in gather(array).addressable_shards}
        shards = [by_device[device] for device in source_devices]
        with jax.enable_x64(True):  # values inside of a step may have 64 bits whatever the user's setting
            shards_there = [make(shards) for make in deliver]
        return jax.make_array_from_single_device_arrays(shape, target, shards_there)

    return reshard


def to_default_memory(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    """Arrays in host memory cannot be sliced in place: they are copied to the devices first."""
    default = default_memory_kind(sharding)
    if sharding.memory_kind in (None, default):
        return lambda array: array
    return array_copier(sharding.with_memory_kind(default))


def _shard_maker(
    wanted: Box, pieces: Sequence[ShardPiece], device: Any, target: Sharding
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """The function that builds one target shard from the source's shards."""
    place = array_copier(SingleDeviceSharding(device))
    slices = [slice_of(piece) for piece in pieces]
    sources = [piece.source for piece in pieces]
    default = default_memory_kind(target)
    in_memory = target.memory_kind in (None, default)
    finish: Callable[[jax.Array], jax.Array] = (
        (lambda a: a)
        if in_memory
        else array_copier(SingleDeviceSharding(device, memory_kind=target.memory_kind))
    )
    if len(pieces) == 1 and pieces[0].box == wanted:
        return lambda shards: finish(place(slices[0](shards[sources[0]])))
    starts = [
        tuple(a - base for (a, _), (base, _) in zip(piece.box, wanted, strict=True)) for piece in pieces
    ]
    assemble = assembler(tuple(b - a for a, b in wanted), tuple(starts))

    def make(shards: Sequence[jax.Array]) -> jax.Array:
        return finish(assemble(*[place(slice_(shards[k])) for slice_, k in zip(slices, sources)]))

    return make


def slice_of(piece: ShardPiece) -> Callable[[jax.Array], jax.Array]:
    if piece.box == piece.shard:
        return lambda shard: shard
    start = tuple(a - base for (a, _), (base, _) in zip(piece.box, piece.shard, strict=True))
    end = tuple(b - base for (_, b), (base, _) in zip(piece.box, piece.shard, strict=True))
    slice_: Callable[[jax.Array], jax.Array] = jax.jit(lambda shard: lax.slice(shard, start, end))
    return slice_


_ASSEMBLY_ORDER = 1 << 30
"""No program of another kind is started in this order."""


@contextlib.contextmanager
def assembling() -> Iterator[None]:
    """Inside, received pieces are assembled: programs that wait for messages which are not there yet.

    A device runs the programs of a thread in their order.  A fragment that was issued after an assembly must
    not wait for it: the message may depend on the fragment.  So assemblies have an order of their own, that
    of the receives.
    """
    with execution_order(_ASSEMBLY_ORDER), jax.enable_x64(True):  # values of a step may have 64 bits
        yield


def assembler(shape: tuple[int, ...], starts: tuple[tuple[int, ...], ...]) -> Callable[..., jax.Array]:
    """The function that puts parts together into an array of `shape`, each at its start."""

    def assemble(*parts: jax.Array) -> jax.Array:
        whole = lax.full(shape, 0, parts[0].dtype)
        for part, start in zip(parts, starts, strict=True):
            whole = lax.dynamic_update_slice(whole, part, start)
        return whole

    jitted: Callable[..., jax.Array] = jax.jit(assemble)
    return jitted

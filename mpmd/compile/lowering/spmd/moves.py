"""The part of a value on each device, and how it moves: gathering, sharding and resharding, as HLO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpmd.compile.hlo.attributes import ReplicaGroups
from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.lowering.collectives import rejoin
from mpmd.compile.lowering.stablehlo_program import Axis, Sharding


def parts(axes: Sequence[Axis]) -> int:
    """The number of parts of a dim that is sharded along axes."""
    return math.prod(axis.size for axis in axes)


def place(axes: Sequence[Axis], device: int) -> int:
    number = 0
    for axis in axes:
        number = number * axis.size + device // axis.stride % axis.size
    return number


def groups(axes: Sequence[Axis], devices: int) -> tuple[tuple[int, ...], ...]:
    """Devices that differ on the given axes only, each group in the order of the parts."""
    members: dict[int, list[int]] = {}
    for device in range(devices):
        rest = device - sum(device // axis.stride % axis.size * axis.stride for axis in axes)
        members.setdefault(rest, []).append(device)
    return tuple(tuple(sorted(group, key=lambda d: place(axes, d))) for group in members.values())


def is_whole(sharding: Sharding) -> bool:
    """Whether nothing is sharded."""
    return not any(sharding)


def even(shape: Shape, sharding: Sharding) -> Sharding:
    """A sharding that leaves dims whole which their axes do not divide."""
    if is_whole(sharding):
        return sharding
    return tuple(() if size % parts(axes) else axes for size, axes in zip(shape.dims, sharding, strict=True))


def local(shape: Shape, sharding: Sharding) -> Shape:
    """The shape of one device's part of an evenly sharded value."""
    if is_whole(sharding):
        return shape
    return shape.with_dims([size // parts(axes) for size, axes in zip(shape.dims, sharding, strict=True)])


CHANNEL = 1
"""The channel of every collective of a partitioned program: its ids are devices."""


def own_place(build: HloBuilder, axes: Sequence[Axis]) -> HloInstruction:
    """The number of this device's part, as an `s32`."""
    device = build.convert(build.add("partition-id"), "s32")
    total: HloInstruction | None = None
    for axis in axes:
        coordinate = device
        if axis.stride > 1:
            coordinate = build.add("divide", coordinate, build.constant(axis.stride, "s32"))
        coordinate = build.add("remainder", coordinate, build.constant(axis.size, "s32"))
        if total is None:
            total = coordinate
        else:
            total = build.add(
                "add", build.add("multiply", total, build.constant(axis.size, "s32")), coordinate
            )
    return build.constant(0, "s32") if total is None else total


def begin(build: HloBuilder, axes: Sequence[Axis], size: int) -> HloInstruction:
    """The offset of this device's part of a dim, if each part has `size` elements; an `s32`."""
    return build.add("multiply", own_place(build, axes), build.constant(size, "s32"))


def joined(axes: Sequence[Axis], devices: int) -> dict[str, Any]:
    return {
        "replica_groups": ReplicaGroups(groups(axes, devices)),
        "channel_id": CHANNEL,
        "use_global_device_ids": True,
    }


def gathered(
    build: HloBuilder, value: HloInstruction, dim: int, axes: Sequence[Axis], devices: int
) -> HloInstruction:
    """A dim with the parts of all devices along axes."""
    if not axes:
        return value
    dims = list(value.shape.dims)
    dims[dim] *= parts(axes)
    return build.add(
        "all-gather",
        value,
        shape=value.shape.with_dims(dims),
        dimensions=(dim,),
        **joined(axes, devices),
    )


def own_part(build: HloBuilder, value: HloInstruction, shardings: Sharding) -> HloInstruction:
    """This device's part of a value that it holds whole."""
    if not any(shardings):
        return value
    sizes = [n // parts(axes) for n, axes in zip(value.shape.dims, shardings, strict=True)]
    zero = build.constant(0, "s32")
    starts = [begin(build, axes, n) if axes else zero for axes, n in zip(shardings, sizes)]
    return build.dynamic_slice(value, starts, sizes)


def resharded(
    build: HloBuilder, value: HloInstruction, source: Sharding, target: Sharding, devices: int
) -> HloInstruction:
    """A value with another sharding: lost axes are gathered or exchanged, new axes are sliced off."""
    if source == target:
        return value
    given_up = [_rest(a, b) for a, b in zip(source, target, strict=True)]
    gets = [_rest(b, a) for a, b in zip(source, target, strict=True)]
    permuted = _permuted(build, value, source, target, devices)
    if permuted is not None:
        return permuted
    waiting = {dim: axes for dim, axes in enumerate(given_up) if axes}
    while waiting:
        dim, to = _next_move(waiting, gets)
        axes = waiting.pop(dim)
        if to is None:
            value = gathered(build, value, dim, axes, devices)
        else:
            value = _exchanged(build, value, to, dim, axes, devices)
            gets[to] = ()
    return own_part(build, value, tuple(gets))


def _next_move(
    waiting: Mapping[int, Sequence[Axis]], gets: Sequence[Sequence[Axis]]
) -> tuple[int, int | None]:
    """A dim that gives up axes, and the dim that gets them.

    A dim gets axes only when it has given up its own: new axes divide the part that is left.
    """
    for dim, axes in waiting.items():
        for to, got in enumerate(gets):
            if got == axes and to not in waiting:
                return dim, to
    return next(iter(waiting)), None


def _rest(axes: Sequence[Axis], others: Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes after the common prefix."""
    common = 0
    while common < min(len(axes), len(others)) and axes[common] == others[common]:
        common += 1
    return tuple(axes[common:])


def _exchanged(
    build: HloBuilder, value: HloInstruction, split: int, along: int, axes: Sequence[Axis], devices: int
) -> HloInstruction:
    """One dim gathered, another sharded along the same axes instead."""
    count = parts(axes)
    exchanged = build.add(
        "all-to-all",
        value,
        dimensions=(split,),
        replica_groups=ReplicaGroups(groups(axes, devices)),
        channel_id=CHANNEL,
    )
    return rejoin(build, exchanged, split, along, count)


def _permuted(
    build: HloBuilder, value: HloInstruction, source: Sharding, target: Sharding, devices: int
) -> HloInstruction | None:
    """The same parts on other devices, as many as before; None if the parts differ."""
    if [parts(a) for a in source] != [parts(a) for a in target]:
        return None
    holders: dict[tuple[int, ...], list[int]] = {}
    for device in range(devices):
        holders.setdefault(tuple(place(a, device) for a in source), []).append(device)
    wanted: dict[tuple[int, ...], list[int]] = {}
    for device in range(devices):
        wanted.setdefault(tuple(place(a, device) for a in target), []).append(device)
    pairs: list[tuple[int, int]] = []
    for part, targets in wanted.items():
        have = holders[part]
        stay = [d for d in targets if d in have]
        pairs += [(d, d) for d in stay]
        pairs += zip([d for d in have if d not in stay], [d for d in targets if d not in stay])
    return build.add(
        "collective-permute", value, source_target_pairs=tuple(sorted(pairs)), channel_id=CHANNEL
    )

"""The part of a value that each device holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpmd.compile.hlo.shape import Shape
from mpmd.compile.lowering.stablehlo_program import Axis, Sharding


def parts(axes: Sequence[Axis]) -> int:
    """The number of parts of a dim that is sharded along axes."""
    return math.prod(axis.size for axis in axes)


def place(axes: Sequence[Axis], device: int) -> int:
    found = 0
    for axis in axes:
        found = found * axis.size + device // axis.stride % axis.size
    return found


def groups(axes: Sequence[Axis], devices: int) -> tuple[tuple[int, ...], ...]:
    """Devices that differ on the given axes only, each group in the order of the parts."""
    found: dict[int, list[int]] = {}
    for device in range(devices):
        rest = device - sum(device // axis.stride % axis.size * axis.stride for axis in axes)
        found.setdefault(rest, []).append(device)
    return tuple(tuple(sorted(group, key=lambda d: place(axes, d))) for group in found.values())


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

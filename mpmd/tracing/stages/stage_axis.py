"""A stack whose parts are equal, and whose meshes share a client, as one array over an axis of stages.

Both ways no element is copied: the array and the parts are the same buffers.  On CPUs each mesh has a client
of its own unless its devices are given, or `pinning="never"`; an array over several clients does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.errors import PlacementError


def over_axis(parts: Sequence[Any], dim: int, axis: str) -> jax.Array:
    """One array of parts of equal shapes, split along a dim over a new axis of a mesh.

    Raises:
        PlacementError: the parts differ in shape or sharding, or their meshes share devices or no client.
    """
    shardings = [_named(part) for part in parts]
    problem = _problem(parts, shardings, dim, axis)
    if problem:
        raise PlacementError(
            f"the parts of a stack cannot be one array over an axis {axis!r}: {problem}\n"
            "  use .whole(), which joins them on the host, or the parts"
        )
    first = shardings[0]
    devices = np.stack([sharding.mesh.devices for sharding in shardings])
    mesh = Mesh(devices, (axis, *first.mesh.axis_names))
    spec = list(first.spec) + [None] * (parts[0].ndim - len(first.spec))
    spec[dim] = axis
    whole = list(parts[0].shape)
    whole[dim] *= len(parts)
    shards = {shard.device: shard.data for part in parts for shard in part.addressable_shards}
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    ordered = [shards[device] for device in devices.flat]
    return jax.make_array_from_single_device_arrays(tuple(whole), sharding, ordered)


def of_axis(array: Any, dim: int, count: int) -> list[jax.Array] | None:
    """The parts of an array that an axis of its mesh splits along a dim into so many; None if none does."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= dim:
        return None
    axis = sharding.spec[dim]
    mesh = sharding.mesh
    if not isinstance(axis, str) or mesh.shape[axis] != count or count == 1:
        return None
    position = mesh.axis_names.index(axis)
    others = tuple(name for name in mesh.axis_names if name != axis)
    spec = [None if at == dim else entry for at, entry in enumerate(sharding.spec)]
    shape = list(array.shape)
    shape[dim] //= count
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    made = []
    for number in range(count):
        devices = np.take(mesh.devices, number, position)
        own = Mesh(devices, others) if others else Mesh(devices.reshape(1), (_ALONE,))
        ordered = [shards[device] for device in devices.flat]
        target = NamedSharding(own, PartitionSpec(*spec))
        made.append(jax.make_array_from_single_device_arrays(tuple(shape), target, ordered))
    return made


_ALONE = "device"
"""The axis of the mesh of a part that is on one device."""


def _named(part: Any) -> Any:
    """The sharding of a part over the axes of a mesh."""
    sharding = getattr(part, "sharding", None)
    if isinstance(sharding, NamedSharding) or sharding is None or len(sharding.device_set) != 1:
        return sharding
    return NamedSharding(Mesh(np.array(list(sharding.device_set)), (_ALONE,)), PartitionSpec())


def _problem(parts: Sequence[Any], shardings: Sequence[Any], dim: int, axis: str) -> str:
    if not all(isinstance(sharding, NamedSharding) for sharding in shardings):
        return "they are not arrays on meshes"
    first = shardings[0]
    shapes = list(dict.fromkeys(str(tuple(part.shape)) for part in parts))
    if len(shapes) > 1:
        return f"they have different shapes, {' and '.join(shapes)}"
    if any(s.spec != first.spec or s.mesh.shape != first.mesh.shape for s in shardings):
        return "they are sharded differently"
    if axis in first.mesh.axis_names or (len(first.spec) > dim and first.spec[dim] is not None):
        return f"dim {dim} is sharded already, or the meshes have such an axis"
    devices = [device for sharding in shardings for device in sharding.mesh.devices.flat]
    if len({id(device.client) for device in devices}) > 1:
        return "each mesh has a client of its own; with pinning='never' they share one"
    return "" if len(set(devices)) == len(devices) else "their meshes share devices"

"""Arrays on meshes over several processes, of which each process has some: made, and copied.

JAX's own functions compare the values of all processes first, or cannot copy to devices of another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from mpmd.errors import SignatureError
from mpmd.jax_compat import array_copier


def put(value: Any, target: Sharding) -> jax.Array:
    """A host array, equal in all processes, with a sharding; each process copies its own parts."""
    if target.is_fully_addressable:
        return jax.device_put(value, target)
    return jax.make_array_from_callback(value.shape, target, lambda index: value[index])


def putter(target: Sharding, path: str) -> Callable[[Any], jax.Array]:
    """The function that moves a host array, or an array of JAX, to `target`.

    It raises a SignatureError that names `path` where parts of the array are in other processes only.
    """
    whole_here = target.is_fully_addressable
    move = within_mesh(target)

    def moved(value: Any) -> jax.Array:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if not has_parts_for(value, target):
                raise SignatureError(f"{path} is in another process\n  bring it here with mpmd.fetch")
            if not whole_here and value.sharding.device_set == target.device_set:
                return move(value)
            value = value.addressable_shards[0].data
        if whole_here:
            return jax.device_put(value, target)
        return put(np.asarray(value), target)

    return moved


def has_parts_for(value: Any, target: Sharding) -> bool:
    """Whether an argument can be moved to `target`: it is whole here, or on the same devices."""
    sharding = getattr(value, "sharding", None)
    if sharding is None or sharding.is_fully_addressable:
        return True
    whole = sharding.is_fully_replicated and sharding.has_addressable_devices
    return bool(whole or sharding.device_set == target.device_set)


def within_mesh(target: Sharding) -> Callable[[jax.Array], jax.Array]:
    """The function that moves an array among the devices of its mesh; all their processes must call it."""
    move: Callable[[jax.Array], jax.Array] = jax.jit(jnp.copy, out_shardings=target)

    def moved(array: jax.Array) -> jax.Array:
        with jax.enable_x64(True):  # values inside of a step may have 64 bits whatever the user's setting
            return move(array)

    return moved


def copier_of(target: Sharding) -> Callable[[jax.Array], jax.Array]:
    """The function that copies an array with equal shards; see `jax_compat.array_copier`."""
    if target.is_fully_addressable:
        return array_copier(target)
    copies = {
        device: array_copier(SingleDeviceSharding(device, memory_kind=target.memory_kind))
        for device in target.addressable_devices
    }

    def copied(array: jax.Array) -> jax.Array:
        parts = [copies[shard.device](shard.data) for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, target, parts)

    return copied

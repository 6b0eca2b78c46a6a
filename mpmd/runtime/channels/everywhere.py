"""Arrays that one process holds, brought to every process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from mpmd import jax_compat
from mpmd.runtime.channels.links import FETCHES, Links, links, message_number
from mpmd.runtime.processes.world import World, world

_turns = itertools.count()


def everywhere(leaves: Sequence[Any]) -> list[Any]:
    """The leaves, in which arrays of other processes are replaced by copies on this process's first device.

    All processes must call it, in the same order, with the same number of leaves.

    Raises:
        PeerError: another process failed.
    """
    joined = world()
    assert joined is not None
    turn = next(_turns)
    joined.begin(f"fetch {turn}")
    connections = links()
    plain = [_numbers(leaf) for leaf in leaves]
    owners = {k: _owner(leaf) for k, leaf in enumerate(plain) if _is_absent(leaf)}
    wanted = [
        {int(k): owner for k, owner in json.loads(text).items()}
        for text in joined.gather("fetch", json.dumps(owners))
    ]
    try:
        _offer(joined, connections, turn, plain, wanted)
        for k, owner in owners.items():
            plain[k] = _pull(joined, connections, turn, k, owner, plain[k])
        jax.block_until_ready([plain[k] for k in owners])
    except jax_compat.JaxRuntimeError as error:
        joined.explain(error)
        raise
    joined.gather("fetched", "")  # all offers were pulled: the arrays may be donated again
    return [
        jax_compat.as_key(new, leaf.dtype) if k in owners and _is_key(leaf) else new if k in owners else leaf
        for k, (leaf, new) in enumerate(zip(leaves, plain, strict=True))
    ]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax_compat.is_key(leaf.dtype)


def _numbers(leaf: Any) -> Any:
    """Random keys as the integers that they consist of."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.sharding.has_addressable_devices


def _owner(array: jax.Array) -> int:
    return min(device.process_index for device in array.sharding.device_set)


def _message(joined: World, turn: int, leaf: int, receiver: int) -> int:
    return message_number(FETCHES, turn, leaf * joined.count + receiver)


def _offer(
    joined: World, connections: Links, turn: int, leaves: Sequence[Any], wanted: Sequence[dict[int, int]]
) -> None:
    """Offers what the others lack and this process holds, each array whole, once per receiver."""
    whole: dict[int, jax.Array] = {}
    for receiver, owners in enumerate(wanted):
        for k in (k for k, owner in owners.items() if owner == joined.index and leaves[k].size):
            if k not in whole:
                whole[k] = jax.device_put(leaves[k], jax.local_devices()[0])
            connections.offer(_message(joined, turn, k, receiver), [whole[k]])


def _pull(joined: World, connections: Links, turn: int, k: int, owner: int, array: jax.Array) -> jax.Array:
    here = SingleDeviceSharding(jax.local_devices()[0])
    if not array.size:
        return jax.numpy.zeros(array.shape, array.dtype, device=here)
    kind = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=here)
    return connections.pull(owner, _message(joined, turn, k, joined.index), [kind])[0]

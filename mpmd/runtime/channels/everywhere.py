"""Arrays that some processes hold, brought to every process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from mpmd import jax_compat
from mpmd.runtime.channels.links import FETCHES, Links, links, message_number
from mpmd.runtime.channels.reshard import Box, assembler, boxes
from mpmd.runtime.processes.world import World, world

_turns = itertools.count()


def everywhere(leaves: Sequence[Any]) -> list[Any]:
    """The leaves; arrays that are not whole here are replaced by copies on this process's first device.

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
    missing = [k for k, leaf in enumerate(plain) if isinstance(leaf, jax.Array) and not _is_whole_here(leaf)]
    wanted = [json.loads(text) for text in joined.gather("fetch", json.dumps(missing))]
    sources = {k: _sources(plain[k]) for k in sorted(set().union(*wanted))}
    try:
        _offer(joined, connections, turn, plain, wanted, sources)
        made = {k: _joined(joined, connections, turn, k, plain[k], sources[k]) for k in missing}
        jax.block_until_ready(list(made.values()))
    except jax_compat.JaxRuntimeError as error:
        joined.explain(error)
        raise
    except BaseException as error:  # the others would wait for this process
        joined.fail_here(error)
        raise
    joined.gather("fetched", "")  # all offers were pulled: the arrays may be donated again
    return [
        leaf if new is None else jax_compat.as_key(new, leaf.dtype) if _is_key(leaf) else new
        for k, leaf in enumerate(leaves)
        for new in [made[k] if k in made else _own_copy(plain[k])]
    ]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax_compat.is_key(leaf.dtype)


def _numbers(leaf: Any) -> Any:
    """Random keys as the integers that they consist of."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_whole_here(array: jax.Array) -> bool:
    sharding = array.sharding
    replicated = sharding.is_fully_replicated and sharding.has_addressable_devices
    return bool(sharding.is_fully_addressable or replicated)


def _own_copy(leaf: Any) -> jax.Array | None:
    """This process's copy of an array that several processes have whole; None for other leaves."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return None
    copy: jax.Array = leaf.addressable_shards[0].data
    return copy


def _sources(array: jax.Array) -> dict[int, list[tuple[Box, Any]]]:
    """For each process the parts of an array that it gives to others, each with its device.

    A part that several have comes from the first of them.
    """
    first: dict[Box, Any] = {}
    for device, box in zip(*boxes(array.sharding, array.shape), strict=True):
        if box not in first or device.process_index < first[box].process_index:
            first[box] = device
    found: dict[int, list[tuple[Box, Any]]] = {}
    for box, device in first.items():
        found.setdefault(device.process_index, []).append((box, device))
    return found


def _message(joined: World, turn: int, leaf: int, receiver: int) -> int:
    return message_number(FETCHES, turn, leaf * joined.count + receiver)


def _parts(array: jax.Array, of_process: Sequence[tuple[Box, Any]]) -> list[jax.Array]:
    """The parts that this process gives, on its first device."""
    held = {shard.device: shard.data for shard in array.addressable_shards}
    return [jax.device_put(held[device], jax.local_devices()[0]) for _, device in of_process]


def _offer(
    joined: World,
    connections: Links,
    turn: int,
    leaves: Sequence[Any],
    wanted: Sequence[Sequence[int]],
    sources: dict[int, dict[int, list[tuple[Box, Any]]]],
) -> None:
    """Offers this process's parts of what the others lack, once per receiver."""
    known: dict[int, list[jax.Array]] = {}
    for receiver, of_receiver in enumerate(wanted):
        for k in of_receiver if receiver != joined.index else ():
            if joined.index in sources[k] and leaves[k].size:
                if k not in known:
                    known[k] = _parts(leaves[k], sources[k][joined.index])
                connections.offer(_message(joined, turn, k, receiver), known[k])


def _joined(
    joined: World,
    connections: Links,
    turn: int,
    k: int,
    array: jax.Array,
    sources: dict[int, list[tuple[Box, Any]]],
) -> jax.Array:
    """A whole array on this process's first device, from the parts of all processes."""
    here = SingleDeviceSharding(jax.local_devices()[0])
    if not array.size:
        return jax.numpy.zeros(array.shape, array.dtype, device=here)
    parts: list[jax.Array] = []
    starts: list[tuple[int, ...]] = []
    for process, of_process in sources.items():
        sizes = [tuple(end - start for start, end in box) for box, _ in of_process]
        kinds = [jax.ShapeDtypeStruct(size, array.dtype, sharding=here) for size in sizes]
        if process == joined.index:
            parts += _parts(array, of_process)
        else:
            parts += connections.pull(process, _message(joined, turn, k, joined.index), kinds)
        starts += [tuple(start for start, _ in box) for box, _ in of_process]
    if len(parts) == 1:
        return parts[0]
    with jax.enable_x64(True):  # arrays of 64 bits stay as they are, whatever the user's setting
        return assembler(array.shape, tuple(starts))(*parts)

"""Results on every process: which ones, and arrays that some processes hold, brought to all."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from mpmd import jax_compat
from mpmd.errors import PeerError
from mpmd.runtime.channels.links import FETCHES, Links, links, message_number
from mpmd.runtime.channels.reshard import Box, assembler, boxes
from mpmd.runtime.processes.exchange import Alike, WorldExchange
from mpmd.runtime.processes.world import World, differ, world
from mpmd.runtime.program.graph import EntryGraph, OutputSpec, TransferOp
from mpmd.runtime.program.streams import processes_text
from mpmd.runtime.run.waiting import wait_for


def with_results_everywhere(
    graph: EntryGraph, processes: Mapping[str, tuple[int, ...]], replicated: Collection[int] = ()
) -> EntryGraph:
    """Transfers scalar and replicated results to meshes of the other processes, where they are results too.

    ```
    loss = m1["f"](x); return loss   ->   loss = m1["f"](x); copy = transfer loss to m0; return loss, copy
    ```

    Args:
        graph: the entry function.
        processes: for each mesh the indices of its processes, in pipeline order; empty if there is one.
        replicated: positions of results that are not scalars, which every process gets too.

    Returns:
        The graph; results that are there twice have one index.
    """
    ops, outputs, types = list(graph.ops), list(graph.outputs), dict(graph.types)
    fresh = itertools.count(max(types, default=-1) + 1)
    for spec in graph.outputs:
        kind = types[spec.value]
        if kind.shape != () and spec.index not in replicated:
            continue
        value, own = spec.value, processes.get(kind.mesh, ())
        if len(own) > 1 and kind.sharding is not None:  # whole in each of its processes
            value = next(fresh)
            types[value] = dataclasses.replace(kind, sharding=None, memory_kind=None)
            ops.append(TransferOp(spec.value, value))
            outputs[outputs.index(spec)] = dataclasses.replace(spec, value=value)
        copies = [copy for copy in graph.copies if copy.index == spec.index]
        outputs += copies
        there = (process for copy in copies for process in processes[types[copy.value].mesh])
        for mesh in _meshes_of_others(processes, {*own, *there}):
            copy = next(fresh)
            types[copy] = dataclasses.replace(kind, mesh=mesh, sharding=None, memory_kind=None)
            ops.append(TransferOp(spec.value, copy))
            outputs.append(OutputSpec(copy, spec.index, spec.path))
    return dataclasses.replace(graph, ops=tuple(ops), outputs=tuple(outputs), types=types)


def mesh_of_each(processes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The first mesh of each process; none where a mesh is over several, whose scalars both have."""
    first: dict[int, str] = {}
    for mesh, indices in processes.items():
        if len(indices) > 1:
            return ()
        first.setdefault(indices[0], mesh)
    return tuple(first.values())


def _meshes_of_others(processes: Mapping[str, tuple[int, ...]], covered: set[int]) -> list[str]:
    """Meshes that cover all other processes, the first ones possible."""
    chosen = []
    for mesh, indices in processes.items():
        if not covered.issuperset(indices):
            covered.update(indices)
            chosen.append(mesh)
    return chosen


_turns = itertools.count()


def everywhere(paths: Sequence[str], leaves: Sequence[Any]) -> list[Any]:
    """The leaves; arrays that are not whole here are replaced by copies on this process's first device.

    All processes must call it, in the same order, with leaves of the same kinds.

    Args:
        paths: of the leaves, for messages.
        leaves: arrays; others stay as they are.

    Raises:
        PeerError: another process failed, or calls it with other leaves.
    """
    joined = world()
    assert joined is not None
    turn = next(_turns)
    kinds = "".join(f"{path}: {kind_text(leaf)}\n" for path, leaf in zip(paths, leaves, strict=True))
    with joined.exchange(f"fetch {turn}", Alike("fetches other arrays", kinds)) as exchange:
        connections = links(exchange)
        plain = [_numbers(leaf) for leaf in leaves]
        arrays = [k for k, leaf in enumerate(plain) if isinstance(leaf, jax.Array)]
        missing = [k for k in arrays if not _is_whole_here(plain[k])]
        origins = [joined.origins.of(leaf) for leaf in leaves]
        of_all = exchange.gather_json([missing, origins])
        _compare_origins(exchange, paths, [origin for _, origin in of_all])
        wanted = [origin for origin, _ in of_all]
        needed = sorted(set().union(*wanted))
        copies = _other_copies(exchange, paths, leaves, needed, missing)
        sources = {k: {} if k in copies else _sources(plain[k]) for k in needed}
        try:
            _offer(joined, connections, turn, plain, wanted, sources)
            arrived = {k: _joined(joined, connections, turn, k, plain[k], sources[k]) for k in missing}
            for array in arrived.values():
                wait_for(array, joined.check)
                array.block_until_ready()
        except jax_compat.JaxRuntimeError as error:
            joined.explain(error)
            raise
        exchange.gather("")  # all offers were pulled: the arrays may be donated again
    return [
        leaf if new is None else jax_compat.as_key(new, leaf.dtype) if _is_key(leaf) else new
        for k, leaf in enumerate(leaves)
        for new in [arrived[k] if k in arrived else _own_copy(plain[k])]
    ]


def kind_text(leaf: Any) -> str:
    """The shape and dtype of an array of JAX or NumPy; the type of any other leaf."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return type(leaf).__name__


def _compare_origins(
    exchange: WorldExchange, paths: Sequence[str], of_all: Sequence[Sequence[list[str]]]
) -> None:
    """Raises a PeerError if processes give results of different calls, or different results of one.

    No process may lack any of them: each would get an array of its own.
    """
    for k, path in enumerate(paths):
        known = {process: origins[k] for process, origins in enumerate(of_all) if origins[k]}
        first = min(known, default=0)
        other = next((process for process in known if differ(known[process], known[first])), None)
        if other is not None:
            exchange.settled = True
            raise PeerError(
                f"process {other} fetches another array than process {first}{f' at {path}' if path else ''}\n"
                f"    process {first}: {known[first][0]}\n    process {other}: {known[other][0]}\n"
                "  every process must call mpmd.fetch for the same arrays, in the same order"
            )


def _other_copies(
    exchange: WorldExchange,
    paths: Sequence[str],
    leaves: Sequence[Any],
    needed: Sequence[int],
    missing: Sequence[int],
) -> set[int]:
    """The needed leaves that this process holds a copy of, other than the array that others lack.

    Raises:
        PeerError: the processes that lack an array, and those that hold it, mean different ones.
    """
    own = [_Candidate(k in missing, *_place(leaves[k]), exchange.world.origins.of(leaves[k])) for k in needed]
    of_all = exchange.gather_json(own) if needed else []
    copies = set[int]()
    for at, k in enumerate(needed):
        candidates = [_Candidate(*of_process[at]) for of_process in of_all]
        first, wanted = next((p, of) for p, of in enumerate(candidates) if of.is_missing)
        other = next((p for p, of in enumerate(candidates) if not of.may_be(wanted, p)), None)
        if other is not None:
            exchange.settled = True
            raise PeerError(_other_array(paths[k], {first: wanted, other: candidates[other]}))
        if own[at].place != wanted.place:
            copies.add(k)
    return copies


class _Candidate(NamedTuple):
    """What a process would bring: whether it lacks it, its processes, a checksum of its place, its origin."""

    is_missing: bool
    holders: list[int]
    place: int
    origin: list[str]

    def may_be(self, wanted: _Candidate, process: int) -> bool:
        """Whether it is the array that another process lacks, or a copy that no process reads."""
        if not self.is_missing and process not in wanted.holders:
            return True
        return self.place == wanted.place and not differ(self.origin, wanted.origin)


def _other_array(path: str, of_process: Mapping[int, _Candidate]) -> str:
    """The page for two arrays at one place of a pytree."""
    first, second = sorted(of_process)
    rows = [
        f"    process {p}: {[*of.origin, 'an array'][0]}, in {processes_text(of.holders)}"
        for p, of in sorted(of_process.items())
    ]
    return "\n".join(
        [
            f"process {second} fetches another array than process {first}{f' at {path}' if path else ''}",
            *rows,
            "  every process must call mpmd.fetch for the same arrays, in the same order",
        ]
    )


def _place(leaf: Any) -> tuple[list[int], int]:
    """The processes that hold an array, and a checksum of what each of its devices holds."""
    array = _numbers(leaf)
    if not isinstance(array, jax.Array):
        return [], 0
    shards = [(device.id, box) for device, box in zip(*boxes(array.sharding, array.shape), strict=True)]
    processes = sorted({device.process_index for device in array.sharding.device_set})
    return processes, zlib.crc32(repr(shards).encode())


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax_compat.is_key(leaf.dtype)


def _numbers(leaf: Any) -> Any:
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
    by_process: dict[int, list[tuple[Box, Any]]] = {}
    for box, device in first.items():
        by_process.setdefault(device.process_index, []).append((box, device))
    return by_process


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
    """Offers this process's parts of the leaves that others lack, once per receiver."""
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

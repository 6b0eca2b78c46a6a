"""An argument of a step, usually its state, created where the step reads it: computed, or read from files.

No process and no device holds more of it than its own share.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import keystr, tree_flatten_with_path

from mpmd.api.inputs import InputLeaf, InputPart, PlacedArgument
from mpmd.errors import PeerError, SignatureError, collect
from mpmd.jax_compat import as_key, default_memory_kind, is_key
from mpmd.runtime.channels.everywhere import kind_text
from mpmd.runtime.channels.mesh_devices import put
from mpmd.runtime.processes.exchange import Alike, WorldExchange, settings_text, without_addresses
from mpmd.runtime.processes.world import world
from mpmd.support.user_code import warn_user
from mpmd.tracing.stages.stacked.stacked import is_stacked
from mpmd.tracing.wanted_ranges import ComputedWhole, Demand, DemandedJaxpr, Range

Index: TypeAlias = tuple[slice, ...]
Reader: TypeAlias = Callable[[str, jax.ShapeDtypeStruct, Index], Any]
"""`reader(path, leaf, index)` returns `leaf[index]` as an array of NumPy."""

_MIN_WARNED_BYTES = 1 << 20
_PROGRAM_SHARE, _PROGRAM_BYTES = 16, 16 << 20
"""One program computes 1/16 of the arrays of a mesh, or so many bytes, whichever is more: random bits take as
much memory as the numbers made of them, and XLA holds those of a whole program at once."""


def initialized(
    argument: PlacedArgument, meshes: Mapping[str, Mesh], init_fn: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """`init_fn(*args)` as an argument of a step; every mesh of this process computes its own leaves.

    All processes must call it, with an initialization that traces to the same program, and equal arguments.

    Args:
        argument: which argument.
        meshes: all meshes of the step.
        init_fn: is traced, and not called.
        args: its arguments: small arrays, such as a random key, which are copied to every mesh.

    Raises:
        SignatureError: its result has another structure, or other shapes or dtypes.
        PeerError: another process initializes something else, or failed.
    """
    joined = world()
    if joined is None:
        return _initialized(argument, meshes, *_traced(argument, init_fn, args))
    with joined.exchange("compiled.init") as exchange:
        traced: list[tuple[ClosedJaxpr, list[Any]]] = []
        exchange.together(lambda: traced.append(_traced(argument, init_fn, args)))
        closed, given = traced[0]
        exchange.compare(Alike("initializes something else", _program_text(argument, closed, given)))
        created: list[Any] = []
        exchange.together(lambda: created.append(_initialized(argument, meshes, closed, given)))
    joined.origins.record("compiled.init", jax.tree.leaves(created[0]))
    return created[0]


def _traced(
    argument: PlacedArgument, init_fn: Callable[..., Any], args: Sequence[Any]
) -> tuple[ClosedJaxpr, list[Any]]:
    """The program of an initialization, and its values: constants, then arguments."""
    closed, shapes = jax.make_jaxpr(init_fn, return_shape=True)(*args)
    check(argument, shapes, "the initialization returns")
    return closed, [*closed.consts, *jax.tree.leaves(args)]


def _program_text(argument: PlacedArgument, closed: ClosedJaxpr, given: Sequence[Any]) -> str:
    """What all processes must initialize alike: settings, the argument, values as checksums, the program."""
    lines = [f"{leaf.path}: {_text(leaf)}" for leaf in argument.leaves]
    constants = len(closed.consts)
    for k, value in enumerate(given):
        name = f"constant {k}" if k < constants else f"argument {k - constants}"
        lines.append(f"{name}: {kind_text(value)}, checksum {_checksum(_host(value, None))}")
    return settings_text() + "\n".join(lines) + "\n" + without_addresses(str(closed.jaxpr))


def _initialized(
    argument: PlacedArgument, meshes: Mapping[str, Mesh], closed: ClosedJaxpr, given: Sequence[Any]
) -> Any:
    wanted: dict[str, list[tuple[int, InputPart]]] = {}
    for k, leaf in enumerate(argument.leaves):
        for part in leaf.parts:
            wanted.setdefault(part.stored.mesh, []).append((k, part))
    notes: list[ComputedWhole] = []
    values: dict[tuple[str, int], jax.Array] = {}
    for mesh, parts in wanted.items():
        here = parts[0][1].is_here
        if not here and jax.process_index() != 0:
            continue
        for group in _groups(parts):
            demands = [(k, _demand(argument.leaves[k], part)) for k, part in group]
            demanded = DemandedJaxpr(
                closed.jaxpr, [[d for at, d in demands if at == k] for k in range(len(argument.leaves))]
            )
            notes += demanded.whole
            if here:
                results = _computed(demanded, demands, meshes[mesh], given, [part for _, part in group])
                jax.block_until_ready(results)  # the next program would take its memory beside this one's
                names = [(argument.leaves[k].path, part.start) for k, part in group]
                values |= zip(names, results, strict=True)
    if jax.process_index() == 0:
        warn_user(_warnings(notes))
    return argument.of_parts(
        lambda leaf, part: part.finished(values[leaf.path, part.start]) if part.is_here else part.absent()
    )


def _groups(parts: Sequence[tuple[int, InputPart]]) -> list[list[tuple[int, InputPart]]]:
    """The arrays of a mesh, in order, in runs that one program computes."""
    sizes = [part.stored.bytes for _, part in parts]
    limit = max(_PROGRAM_BYTES, sum(sizes) // _PROGRAM_SHARE)
    groups: list[list[tuple[int, InputPart]]] = []
    left = 0
    for part, size in zip(parts, sizes, strict=True):
        if not groups or size > left:
            groups.append([])
            left = limit
        groups[-1].append(part)
        left -= size
    return groups


def _demand(leaf: InputLeaf, part: InputPart) -> Demand:
    if leaf.dim is None:
        return None
    return Range(leaf.dim, part.start, part.start + part.shape[leaf.dim])


def _computed(
    demanded: DemandedJaxpr,
    demands: Sequence[tuple[int, Demand]],
    mesh: Mesh,
    given: Sequence[Any],
    parts: Sequence[InputPart],
) -> list[jax.Array]:
    """The arrays of one mesh, computed there by one program.

    Args:
        demanded: the initialization, for the arrays of this mesh.
        demands: for each array its leaf, and the range of it.
        mesh: where.
        given: constants and arguments of the initialization.
        parts: the arrays.
    """
    on_all = _replicated(mesh)
    needed = [*demanded.constants, *demanded.inputs]
    keys = [k for k, value in enumerate(given) if isinstance(value, jax.Array) and is_key(value.dtype)]
    placed = [
        {demand: put(_host(value, demand), on_all) for demand in of_value}
        for value, of_value in zip(given, needed, strict=True)
    ]

    def compute(values: list[dict[Demand, Any]]) -> list[Any]:
        for k in keys:
            values[k] = {demand: as_key(value, given[k].dtype) for demand, value in values[k].items()}
        computed = demanded.run(values[: len(demanded.constants)], values[len(demanded.constants) :])
        results = [computed[leaf][demand] for leaf, demand in demands]
        return [jax.random.key_data(r) if is_key(r.dtype) else r for r in map(jax.numpy.asarray, results)]

    flat, tree = jax.tree.flatten([list(of_value.values()) for of_value in placed])

    def initialize(*values: Any) -> list[Any]:
        lists = jax.tree.unflatten(tree, values)
        return compute([dict(zip(of_value, list_)) for of_value, list_ in zip(needed, lists, strict=True)])

    kinds = [default_memory_kind(part.sharding) for part in parts]
    shardings = [part.sharding.with_memory_kind(kind) for part, kind in zip(parts, kinds, strict=True)]
    results = jax.jit(initialize, out_shardings=shardings)(*flat)
    return [
        result if part.sharding.memory_kind in (None, kind) else jax.device_put(result, part.sharding)
        for part, kind, result in zip(parts, kinds, results, strict=True)
    ]


def _replicated(mesh: Mesh) -> Sharding:
    if mesh.size == 1:
        return SingleDeviceSharding(mesh.devices.flat[0])
    return NamedSharding(mesh, PartitionSpec())


def _host(value: Any, demand: Demand) -> np.ndarray:
    """A range of an argument, as a copy in host memory; random keys as integers."""
    keys = isinstance(value, jax.Array) and is_key(value.dtype)
    array = np.asarray(jax.random.key_data(value) if keys else jax.numpy.asarray(value))
    if demand is not None:
        array = array[(slice(None),) * demand.dim + (slice(demand.start, demand.stop),)]
    return array.copy()


def _warnings(notes: Iterable[ComputedWhole]) -> list[str]:
    """Values that are computed whole although a mesh needs a part of them."""
    large = [note for note in notes if note.whole_bytes - note.range_bytes >= _MIN_WARNED_BYTES]
    return [
        f"the initialization computes {note.whole_bytes >> 20} MiB on a mesh that needs "
        f"{note.range_bytes >> 20} MiB of them: {note.primitive!r}{f' at {note.place}' if note.place else ''}"
        " is not divided\n"
        "  compute each layer of a stack from a key of its own, as jax.vmap over jax.random.split does"
        for note in large
    ]


def loaded(argument: PlacedArgument, reader: Reader) -> Any:
    """An argument of a step, read leaf by leaf; every process reads what its own devices hold.

    Args:
        argument: which argument.
        reader: returns `leaf[index]` for the path of a leaf, such as `['params']['w']`, its shape and dtype,
            and an index of slices.  It is called for each distinct shard.

    Raises:
        SignatureError: what it returns has another shape or dtype.
        PeerError: another process loads something else, or failed.
    """
    shared: dict[str, int] = {}

    def of_part(leaf: InputLeaf, part: InputPart) -> jax.Array:
        return part.finished(_read(leaf, part, reader, shared)) if part.is_here else part.absent()

    joined = world()
    if joined is None:
        return argument.of_parts(of_part)
    paths = "".join(f"{leaf.path}: {_text(leaf)}\n" for leaf in argument.leaves)
    with joined.exchange("compiled.load", Alike("loads something else", paths)) as exchange:
        created: list[Any] = []
        exchange.together(lambda: created.append(argument.of_parts(of_part)))
        _compare_shared(exchange, shared)
    joined.origins.record("compiled.load", jax.tree.leaves(created[0]))
    return created[0]


def _compare_shared(exchange: WorldExchange, shared: Mapping[str, int]) -> None:
    """Raises a PeerError if processes have read other values for one part: its place, and a checksum."""
    first: dict[str, tuple[int, int]] = {}
    for process, checksums in enumerate(exchange.gather_json(dict(shared))):
        for place, checksum in checksums.items():
            holder, expected = first.setdefault(place, (process, checksum))
            if expected != checksum:
                exchange.settled = True
                raise PeerError(
                    f"process {process} has read other values than process {holder} for {place}\n"
                    "  both hold that part: the readers of all processes must read the same files"
                )


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _read(leaf: InputLeaf, part: InputPart, reader: Reader, shared: dict[str, int]) -> jax.Array:
    stored, struct = part.stored, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    dtype, rank = np.dtype(stored.dtype), len(part.shape)
    known: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
    is_shared = part.shape == () or not part.sharding.is_fully_addressable

    def shard(index: Index) -> np.ndarray:
        own = [of_dim.indices(size)[:2] for of_dim, size in zip(index[:rank], part.shape, strict=True)]
        at = tuple((a, b) for a, b in own)
        if at not in known:
            if leaf.dim is not None:
                own[leaf.dim] = (own[leaf.dim][0] + part.start, own[leaf.dim][1] + part.start)
            values = reader(leaf.path, struct, tuple(slice(a, b) for a, b in own))
            if is_key(part.dtype):
                values = jax.random.key_data(values) if isinstance(values, jax.Array) else values
            array = np.array(values)  # a copy: devices on CPUs may keep and reuse the memory
            expected = (*(b - a for a, b in own), *stored.shape[rank:])
            if array.shape != expected or array.dtype != dtype:
                raise SignatureError(
                    f"the reader returned {array.dtype}[{','.join(map(str, array.shape))}] for {leaf.path}\n"
                    f"  expected {dtype}[{','.join(map(str, expected))}], which is "
                    f"[{', '.join(f'{a}:{b}' for a, b in own)}] of {_text(leaf)}"
                )
            known[at] = array
            if is_shared:  # other processes may read it, too
                shared[f"{leaf.path}[{', '.join(f'{a}:{b}' for a, b in own)}]"] = _checksum(array)
        return known[at]

    return jax.make_array_from_callback(stored.shape, part.sharding, shard)


def check(argument: PlacedArgument, shapes: Any, who: str) -> None:
    """Compares a pytree with an argument, by the paths, shapes and dtypes of its leaves.

    Raises:
        SignatureError: they differ; names every leaf.
    """
    given = {keystr(path): leaf for path, leaf in tree_flatten_with_path(shapes, is_leaf=is_stacked)[0]}
    wanted = {leaf.path: leaf for leaf in argument.leaves}
    problems = [f"{path or 'it'} is missing" for path in wanted if path not in given]
    problems += [f"{path or 'it'} is not part of the argument" for path in given if path not in wanted]
    for path, leaf in wanted.items():
        got = given.get(path, leaf)
        if (tuple(got.shape), got.dtype) != (tuple(leaf.shape), leaf.dtype):
            problems.append(f"{path or 'it'} is {_text(got)}, and the step takes {_text(leaf)}")
    if problems:
        raise collect(SignatureError, problems, f"{who} another argument than the step was compiled for:")


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"

"""Placement of arrays: buffer types as JAX shardings, and arrays put, copied and moved accordingly.

On a mesh over several processes, each has its own shards: it makes and copies these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mpmd.errors import ProgramError, SignatureError
from mpmd.jax_calls import array_copier, in_order
from mpmd.jax_compat import default_memory_kind
from mpmd.runtime.channels.protocol import Channel, LocalChannel
from mpmd.runtime.channels.reshard import boxes, resharder
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.pairs import MessageKey
from mpmd.runtime.program.streams import Program, Send


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
    """The function that copies an array with equal shards; see `jax_calls.array_copier`."""
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


_SHARDING = re.compile(r"^\s*<?\s*(?:@[\w.\"]+\s*,)?\s*\[(?P<dims>.*?)\](?:\s*,.*)?>?\s*$", re.S)
_DIM = re.compile(r"\{(?P<axes>[^}]*)\}")
_AXIS = re.compile(r'"(?P<name>[^"]+)"(?P<part>:\(\d+\)\d+)?|(?P<open>\?)')


def partition_spec(sharding: str) -> PartitionSpec:
    """Shardy's text of a sharding as a PartitionSpec.

    ```
    <@mesh, [{"x"}, {}, {"y", "z"}]>   ->   PartitionSpec("x", None, ("y", "z"))
    ```

    Raises:
        ProgramError: the text is not a sharding, or shards over a part of an axis, which JAX cannot express.
    """
    match = _SHARDING.match(sharding)
    if match is None:
        raise ProgramError(f'sharding {sharding!r} cannot be read; expected such as <@mesh, [{{"x"}}, {{}}]>')
    entries: list[str | tuple[str, ...] | None] = []
    for dim in _DIM.finditer(match["dims"]):
        axes = [axis for axis in _AXIS.finditer(dim["axes"]) if axis["name"]]
        if parts := [axis[0] for axis in axes if axis["part"]]:
            raise ProgramError(
                f"sharding {sharding!r} uses a part of an axis, {', '.join(parts)}; give the mesh an axis of "
                f"that size instead"
            )
        names = tuple(axis["name"] for axis in axes)
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    return PartitionSpec(*entries)


_token = jax.jit(lambda array: np.int8(0), keep_unused=True)


class MeshDevices:
    """The devices of every mesh, and the functions that move arrays there.

    None of these functions waits for an array to be computed.

    Attributes:
        programs: small programs that were compiled for arrays on these devices, by what they do and for what.
    """

    def __init__(self, meshes: Mapping[str, Mesh | Sequence[jax.Device]]) -> None:
        """Takes for each mesh a `jax.sharding.Mesh`, or its devices when nothing is sharded over it."""
        self._meshes = {
            name: mesh if isinstance(mesh, Mesh) else Mesh(np.array(list(mesh)), ("devices",))
            for name, mesh in meshes.items()
        }
        self._shardings: dict[BufferType, Sharding] = {}
        self._tokens: dict[Any, Callable[[jax.Array], jax.Array]] = {}
        self.programs: dict[Any, Callable[..., jax.Array]] = {}

    @property
    def meshes(self) -> Mapping[str, Mesh]:
        return self._meshes

    def sharding(self, type_: BufferType) -> Sharding:
        """The JAX sharding of a buffer type; a mesh of one device gives a SingleDeviceSharding.

        Raises:
            ProgramError: the type's mesh has no devices here, or JAX cannot express its sharding.
        """
        if (known := self._shardings.get(type_)) is not None:
            return known
        if type_.mesh not in self._meshes:
            raise ProgramError(
                f"a buffer {type_} lives on mesh {type_.mesh!r}, which has no devices; known meshes: "
                f"{', '.join(map(repr, self._meshes))}"
            )
        mesh = self._meshes[type_.mesh]
        sharding: Sharding
        if mesh.size == 1:
            sharding = SingleDeviceSharding(mesh.devices.flat[0], memory_kind=type_.memory_kind)
        else:
            spec = PartitionSpec() if type_.sharding is None else partition_spec(type_.sharding)
            sharding = NamedSharding(mesh, spec, memory_kind=type_.memory_kind)
        self._shardings[type_] = sharding
        return sharding

    def placer(self, type_: BufferType, path: str, *, fresh: bool) -> Callable[[Any], jax.Array]:
        """The function of a `Feed`: an array of `type_` with the content of a user's argument.

        Host memory is copied, so that the caller may refill it at once.  A `jax.Array` that is already there
        is returned as it is, unless `fresh` requires a buffer of its own, or its elements are stored in
        another order than fragments on CPUs expect.  The function raises a SignatureError that names `path`
        for a value of another shape or element type.
        """
        target, shape, dtype = self.sharding(type_), type_.shape, np.dtype(type_.dtype)
        copy, put = copier_of(target), putter(target, path)
        equal: list[Sharding] = [target]  # shardings seen before that are equivalent to the target
        on_cpu = next(iter(target.device_set)).platform == "cpu"
        ordered = in_order(len(shape)) if on_cpu and len(shape) > 1 else None

        def is_there(sharding: Sharding) -> bool:
            if any(sharding is known for known in equal):
                return True
            same = (
                sharding.device_set == target.device_set
                and sharding.is_equivalent_to(target, len(type_.shape))
                and _memory_kind(sharding) == _memory_kind(target)
            )
            if same and len(equal) < 8:
                equal.append(sharding)
            return same

        def place(value: Any) -> jax.Array:
            if isinstance(value, jax.ShapeDtypeStruct):
                raise SignatureError(f"{path} is {value}, which has no data; call with arrays")
            if not isinstance(value, jax.Array):
                value = np.array(value, dtype=None if isinstance(value, np.ndarray) else dtype)
                _check_signature(value.shape, jax.dtypes.canonicalize_dtype(value.dtype), type_, path)
                return put(value.astype(dtype, copy=False))
            if value.shape != shape or value.dtype != dtype:
                _check_signature(value.shape, jax.dtypes.canonicalize_dtype(value.dtype), type_, path)
                value = value.astype(dtype)  # of 64 bits, from where they are in use
            if ordered is not None:
                value = ordered(value)
            if is_there(value.sharding):
                return copy(value) if fresh else value
            moved = put(value)
            return copy(moved) if fresh and value.sharding.device_set & target.device_set else moved

        return place

    def copier(self, source: BufferType, target: BufferType) -> Callable[[jax.Array], jax.Array]:
        """The function of a `Copy` or a `Send`: a buffer of type `target`, never sharing memory.

        It returns before the array is computed, for all shardings and memories.
        """
        here, there = self.sharding(source), self.sharding(target)
        if boxes(here, source.shape)[1] == boxes(there, target.shape)[1]:
            return copier_of(there)
        if here.is_fully_addressable:
            return resharder(here, there, source.shape)
        return within_mesh(there)

    def token(self, array: jax.Array) -> jax.Array:
        """A tiny array that is ready when `array` is, and that no call consumes."""
        stored = self._tokens.get(_token_key(array.shape, array.dtype, array.sharding))
        if stored is not None:
            return stored(array)
        with jax.enable_x64(True):  # values inside of a step may have 64 bits whatever the user's setting
            return _token(array)

    def prepare_tokens(self, program: Program) -> None:
        """Compiles the programs of `token` for the buffers of a program, so that it takes no time later."""
        for kind in {buffer.type: None for stream in program.streams for buffer in stream.buffers}:
            sharding = self.sharding(kind)
            key = _token_key(kind.shape, np.dtype(kind.dtype), sharding)
            if key not in self._tokens:
                aval = jax.ShapeDtypeStruct(kind.shape, np.dtype(kind.dtype), sharding=sharding)
                with jax.enable_x64(True):
                    self._tokens[key] = _token.lower(aval).compile()

    def paired(self, program: Program) -> Collection[MessageKey]:
        """None: within a process nothing must be paired."""
        return ()

    def channels(self, program: Program, pairs: Sequence[MessageKey] = ()) -> Callable[[], Sequence[Channel]]:
        return LocalChannels(self, program)


def _token_key(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Any:
    """Equal for arrays that one compiled token function takes; all shardings over one device are alike."""
    devices = sharding.device_set
    return shape, dtype, next(iter(devices)) if len(devices) == 1 else sharding, sharding.memory_kind


def _memory_kind(sharding: Sharding) -> str:
    """The memory a sharding names, the devices' default one spelled out."""
    return str(sharding.memory_kind or default_memory_kind(sharding))


def _check_signature(shape: tuple[int, ...], dtype: Any, type_: BufferType, path: str) -> None:
    if shape != type_.shape or dtype != np.dtype(type_.dtype):
        got = BufferType(shape, str(dtype), type_.mesh)
        raise SignatureError(
            f"argument {path}: got {got}, compiled for {type_}\n"
            "  a compiled step takes one signature; the result of mpmd.jit compiles again for others"
        )


class LocalChannels:
    """Creates the channels of each step of one program within this process."""

    def __init__(self, devices: MeshDevices, program: Program, only: frozenset[int] | None = None) -> None:
        """Takes the devices and the program; with `only` other channels cannot be used."""
        movers: list[dict[int, Callable[[jax.Array], jax.Array]]] = [{} for _ in program.channels]
        for stream in program.streams:
            for op in stream.instructions:
                if isinstance(op, Send) and (only is None or op.channel in only):
                    source = stream.buffers[op.buffer].type
                    target = program.channels[op.channel].types[op.sequence]
                    movers[op.channel][op.sequence] = devices.copier(source, target)
        self._movers = movers

    def __call__(self) -> list[LocalChannel]:
        return [LocalChannel(movers) for movers in self._movers]

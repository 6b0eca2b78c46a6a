"""`compiled.arguments`: on which mesh each argument of a step is, and arguments created there."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from mpmd.api.initial_state import Reader, initialized, loaded
from mpmd.api.inputs import InputLeaf, InputPart, PlacedArgument
from mpmd.brief import counted, few
from mpmd.config.ambient import without_ambient_mesh
from mpmd.errors import SignatureError
from mpmd.partition.signature import Arguments
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.streams import Feed, Program
from mpmd.tracing.stages.stacked.stacked import is_stacked

PerLeaf = tuple[tuple[Any, ...], dict[str, Any]]
"""`(positional, keywords)` of a step, with a value for each leaf."""


class StepArguments:
    """The arguments of a compiled step, where they are read."""

    def __repr__(self) -> str:
        where = collections.Counter(type_.mesh for type_ in self._types)
        on = few(f"{count} on {mesh}" for mesh, count in where.items())
        return f"StepArguments: {counted(len(self._types), 'array')}" + (f", {on}" if on else "")

    def __init__(
        self, traced: Arguments, types: list[BufferType], own: Program, devices: MeshDevices
    ) -> None:
        """Takes the arguments as traced, their types on meshes, and the program of this process."""
        self._traced, self._types, self._own, self._devices = traced, types, own, devices

    @without_ambient_mesh
    def init(self, init_fn: Callable[..., Any], *args: Any, argnum: int = 0) -> Any:
        """The argument that `init_fn(*args)` returns, each leaf computed on the mesh that uses it.

            compiled = step.compiled(jax.eval_shape(init_fn, key), batch)
            state = compiled.arguments.init(init_fn, key)

        Every process calls it, and computes the leaves of its own meshes, with the shardings of the step;
        stacks of `mpmd.split` in parts.  The values equal `jax.jit(init_fn)`'s, but for the rounding of
        another fusion.

        Args:
            init_fn: traced, never called on arrays.
            *args: small arrays, such as a random key, which are copied to every mesh.
            argnum: the argument of the step, among those that are not static.

        Raises:
            SignatureError: it returns other leaves, shapes or dtypes than the argument has.
            PeerError: another process initializes something else, or failed.
        """
        return initialized(self._placed(argnum), self._devices.meshes, init_fn, args)

    def load(self, reader: Reader, *, argnum: int = 0) -> Any:
        """An argument whose leaves are read, such as pretrained weights, each where it is used.

            weights = np.load("weights.npz", mmap_mode="r")
            state = compiled.arguments.load(lambda path, leaf, index: weights[path][index])

        Args:
            reader: is called with the path of a leaf, such as `['params']['w']`, its shape and dtype, and an
                index of slices; returns that part of it.  Every process calls it, and reads what its devices
                hold.
            argnum: the argument of the step, among those that are not static.

        Raises:
            SignatureError: the reader returns another shape or dtype.
            PeerError: another process read other values for the same part, or failed.
        """
        return loaded(self._placed(argnum), reader)

    @property
    def abstract(self) -> tuple[Any, ...]:
        """The positional arguments as `jax.ShapeDtypeStruct`s with the shardings that the step wants.

        `mpmd.checkpoint.restore` takes one of them.  In several processes, and on several meshes, a leaf has
        the sharding of its own mesh, from which it is sent to others.
        """
        return self._structs()[0]

    @property
    def shardings(self) -> PerLeaf:
        """The shardings of `(positional, keywords)`."""
        shardings: PerLeaf = jax.tree.map(lambda leaf: leaf.sharding, self._structs())
        return shardings

    @property
    def used(self) -> PerLeaf:
        """For each leaf of `(positional, keywords)` whether this process reads it.

        For the others `jax.ShapeDtypeStruct`s may be given.
        """
        fed = {op.input for stream in self._own.streams for op in stream.instructions if isinstance(op, Feed)}
        return self._per_leaf([k in fed for k in range(len(self._traced.leaves))])

    def _placed(self, position: int) -> PlacedArgument:
        """An argument, by its position among those that are not static.

        Raises:
            SignatureError: there is no such position.
        """
        positional, _ = self._per_leaf(range(len(self._traced.leaves)))
        if not 0 <= position < len(positional):
            count = len(positional)
            raise SignatureError(f"there is no argument {position}; the step has {count} that are not static")
        leaves = []
        for path, slot in tree_flatten_with_path(positional[position], is_leaf=is_stacked)[0]:
            if not is_stacked(slot):
                leaves.append(InputLeaf(keystr(path), (self._part(slot),)))
                continue
            parts, start = [], 0
            for index in slot.parts:
                parts.append(self._part(index, start))
                start += self._traced.leaves[index].shape[slot.dim]
            leaves.append(InputLeaf(keystr(path), tuple(parts), slot.dim))
        return PlacedArgument(tuple(leaves), jax.tree.structure(positional[position]))

    def _part(self, index: int, start: int = 0) -> InputPart:
        leaf, stored = self._traced.leaves[index], self._stored[index]
        sharding = self._devices.sharding(stored)
        return InputPart(leaf.shape, leaf.dtype, bool(leaf.weak_type), stored, sharding, start)

    def _structs(self) -> PerLeaf:
        return self._per_leaf([self._part(k).struct for k in range(len(self._traced.leaves))])

    def _per_leaf(self, values: Any) -> PerLeaf:
        positional, keywords = jax.tree.unflatten(self._traced.tree, values)
        return tuple(positional), keywords

    @functools.cached_property
    def _stored(self) -> list[BufferType]:
        """The type of each flat argument on its mesh; of a scalar, on a mesh of this process if one reads it.

        Every process that uses a scalar reads it, so that each must have it.
        """
        here = {stream.mesh for stream in self._own.streams}
        read = {
            op.input: stream.buffers[op.buffer].type
            for stream in self._own.streams
            for op in stream.instructions
            if isinstance(op, Feed)
        }
        return [
            read.get(k, kind) if kind.shape == () and kind.mesh not in here else kind
            for k, kind in enumerate(self._types)
        ]

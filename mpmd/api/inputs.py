"""Arguments and results in the form in which a program stores them, and arguments as arrays on meshes.

Keys are stored as integers, float0 as bools, weak types as strong ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mpmd.jax_compat import ShapedArray, as_key, is_key
from mpmd.jax_distributed import absent_array_maker
from mpmd.runtime.program.graph import BufferType
from mpmd.support.resources import memoised


def weakly_typed(array: jax.Array) -> jax.Array:
    """A copy of weak type, on the same devices; it does not wait for the array.

    A state that holds a Python number, such as a step counter, is weakly typed.  If a step returned it with
    a strong type, the next step would be traced and compiled anew.
    """
    if array.weak_type:
        return array
    weak: jax.Array = _copier(array.shape, array.dtype, array.sharding)(array)
    return weak


@memoised(256)
def _copier(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    """No function of JAX changes weakness alone, a program keeps its compiled type's."""
    kind = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=True)
    return jax.jit(lambda array: array).lower(kind).compile()


class StoredForms:
    """The forms of flat arguments or results.

    Attributes:
        weak: positions of leaves of weak type.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        """Takes the leaves as `jax.ShapeDtypeStruct`s."""
        self.weak = tuple(i for i, leaf in enumerate(leaves) if getattr(leaf, "weak_type", False))
        self._keys = {i: leaf.dtype for i, leaf in enumerate(leaves) if is_key(leaf.dtype)}
        self._without_values = {
            i: leaf.shape for i, leaf in enumerate(leaves) if leaf.dtype == jax.dtypes.float0
        }
        self._count = len(leaves)

    def stored(self, leaves: list[Any]) -> list[Any]:
        """Flat arguments as the program takes them; other dtypes than expected are unchanged."""
        if not (self._keys or self._without_values) or len(leaves) != self._count:
            return leaves
        leaves = list(leaves)
        for i in self._keys:
            if is_key(getattr(leaves[i], "dtype", None)) and not leaves[i].is_deleted():
                leaves[i] = jax.random.key_data(leaves[i])
        for i, shape in self._without_values.items():
            if getattr(leaves[i], "dtype", None) == jax.dtypes.float0:
                leaves[i] = np.zeros(shape, np.bool_)
        return leaves

    def seen(self, leaves: list[Any]) -> list[Any]:
        leaves = list(leaves)
        for i in self.weak:
            leaves[i] = weakly_typed(leaves[i])
        for i, dtype in self._keys.items():
            leaves[i] = as_key(leaves[i], dtype)
        for i, shape in self._without_values.items():
            leaves[i] = np.zeros(shape, jax.dtypes.float0)
        return leaves


@dataclasses.dataclass(frozen=True)
class InputPart:
    """An array that a step takes: a leaf of an argument, or a part of a stacked one.

    Attributes:
        shape, dtype: of the array; the dtype may be that of random keys.
        weak: whether it is weakly typed.
        stored: its type on its mesh, where random keys are integers.
        sharding: of `stored`.
        start: where it begins in the leaf, along the dim of the stack.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak: bool
    stored: BufferType
    sharding: Sharding
    start: int = 0

    @property
    def is_here(self) -> bool:
        """Whether a device of this process holds some of it."""
        return bool(self.sharding.has_addressable_devices)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        sharding = self.sharding
        if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(self.shape):  # of random keys
            spec = PartitionSpec(*sharding.spec[: len(self.shape)])
            sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding, weak_type=self.weak)

    def absent(self) -> jax.Array:
        """The array where other processes hold it."""
        kind = self.stored
        aval = ShapedArray(kind.shape, np.dtype(kind.dtype), weak_type=self.weak)
        return self.finished(absent_array_maker(aval, self.sharding)())

    def finished(self, stored: jax.Array) -> jax.Array:
        if is_key(self.dtype):
            return as_key(stored, self.dtype)
        return weakly_typed(stored) if self.weak and self.is_here else stored


@dataclasses.dataclass(frozen=True)
class InputLeaf:
    """A leaf of an argument: one array, or a stack in parts.

    Attributes:
        path: within the argument, such as `['params']['w']`.
        parts: its arrays.
        dim: along which parts follow one another; None for a leaf that is not in parts.
    """

    path: str
    parts: tuple[InputPart, ...]
    dim: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        if self.dim is None:
            return first
        size = sum(part.shape[self.dim] for part in self.parts)
        return (*first[: self.dim], size, *first[self.dim + 1 :])

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype


@dataclasses.dataclass(frozen=True)
class PlacedArgument:
    """One argument of a compiled step: its leaves, and how to make the pytree from all their parts."""

    leaves: tuple[InputLeaf, ...]
    tree: Any

    def of_parts(self, value: Callable[[InputLeaf, InputPart], Any]) -> Any:
        """The argument, with the value of a function for each of its arrays."""
        values = [value(leaf, part) for leaf in self.leaves for part in leaf.parts]
        return jax.tree.unflatten(self.tree, values)

"""Parameters of stacked layers as one array per stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

from mpmd.tracing.stages import stage_axis


@register_pytree_with_keys_class
class Stacked:
    """An array in parts along one dim, each on the mesh of its stage.

    `mpmd.split` returns stacked parameters, and their optimizer state, so; they are passed to the next step
    as they are.  It is a pytree of its parts: `jax.tree.map` and `jax.device_get` go into it.

    Attributes:
        parts: the arrays, such as two of `f32[4,16,64]` for `f32[8,16,64]`.
        dim: along which dim they follow one another.
    """

    __slots__ = ("dim", "parts")

    def __init__(self, parts: Sequence[Any], dim: int = 0) -> None:
        self.parts, self.dim = tuple(parts), dim

    @property
    def lengths(self) -> tuple[int, ...]:
        """The size of each part along the dim."""
        return tuple(part.shape[self.dim] for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        first = self.parts[0].shape
        return (*first[: self.dim], sum(self.lengths), *first[self.dim + 1 :])

    @property
    def dtype(self) -> Any:
        """The dtype of the whole array."""
        return self.parts[0].dtype

    @property
    def ndim(self) -> int:
        """How many dims the whole array has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def whole(self) -> Any:
        """The parts in one array: of NumPy, because meshes share no memory; traced where they are."""
        if all(isinstance(part, jax.ShapeDtypeStruct) for part in self.parts):
            weak = all(getattr(part, "weak_type", False) for part in self.parts)
            return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=weak)
        if any(isinstance(part, jax.core.Tracer) for part in self.parts):
            return jax.lax.concatenate(self.parts, self.dim)
        return np.concatenate([np.asarray(part) for part in self.parts], self.dim)

    def over_axis(self, axis: str = "stage") -> jax.Array:
        """The parts as one `jax.Array`, split along the dim over an axis of stages; nothing is copied.

        A step takes such an array as it takes the parts.

        Raises:
            PlacementError: parts differ in shape or sharding, or meshes have a client each, as on CPUs by
                default.
        """
        return stage_axis.over_axis(self.parts, self.dim, axis)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.whole(), dtype)

    def __repr__(self) -> str:
        if not all(hasattr(part, "shape") for part in self.parts):  # JAX puts placeholders into pytrees
            return f"Stacked({list(self.parts)}, dim {self.dim})"
        sizes = ",".join(map(str, self.shape))
        along = " + ".join(map(str, self.lengths))
        return f"Stacked({self.dtype}[{sizes}] in {len(self.parts)} parts, {along} along dim {self.dim})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], int]:
        """The parts with their names, for JAX."""
        return [(GetAttrKey(f"parts[{i}]"), part) for i, part in enumerate(self.parts)], self.dim

    @classmethod
    def tree_unflatten(cls, dim: int, parts: Sequence[Any]) -> Stacked:
        """From its parts, for JAX."""
        return cls(parts, dim)


def is_stacked(value: Any) -> bool:
    """Whether a value is `Stacked`: for `is_leaf=`."""
    return isinstance(value, Stacked)


def in_parts(array: Any, lengths: Sequence[int], dim: int = 0) -> Stacked:
    """An array, traced or not, or a `jax.ShapeDtypeStruct`, in parts of these lengths."""
    ends = list(itertools.accumulate(lengths))
    if isinstance(array, jax.ShapeDtypeStruct):
        shapes = [(*array.shape[:dim], n, *array.shape[dim + 1 :]) for n in lengths]
        return Stacked([jax.ShapeDtypeStruct(s, array.dtype, weak_type=array.weak_type) for s in shapes], dim)
    if isinstance(array, np.ndarray):
        return Stacked(np.split(array, ends[:-1], dim), dim)
    return Stacked([jax.lax.slice_in_dim(array, e - n, e, axis=dim) for n, e in zip(lengths, ends)], dim)

"""Leaves that a program stores in another form: keys as integers, float0 as bools, weak types as strong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from mpmd.jax_compat import as_key, is_key
from mpmd.support.memoisation import memoised


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
    """No function of JAX changes weakness alone, but a program keeps that of the type it was compiled for."""
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

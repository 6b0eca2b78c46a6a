"""Weakly typed arrays: JAX gives Python numbers weak types, which adopt other element types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding

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

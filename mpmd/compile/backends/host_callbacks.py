"""Python functions that fragments on CPU call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_ALIGNMENT = 64
"""Bytes: JAX on CPU takes an array at a multiple of it as it is, without a copy."""


def with_aligned_arguments(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A callback that gets copies of its arguments that JAX takes as they are.

    JAX makes a `jax.Array` of each argument, and copies a large one on a thread of the client.  A fragment on
    several devices runs on these threads itself: if there is one, the callback would wait for itself.
    """

    def call(*arguments: Any) -> Any:
        return callback(*map(_aligned, arguments))

    return call


def _aligned(argument: Any) -> Any:
    """A copy of an array of NumPy at an aligned address; other arguments as they are."""
    if not isinstance(argument, np.ndarray) or not argument.size:
        return argument
    memory = np.empty(argument.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + argument.nbytes].view(argument.dtype).reshape(argument.shape)
    copy[...] = argument
    return copy

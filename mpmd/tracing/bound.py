"""Arguments of named computations that are not arrays: flags, names, functions.  A nested jit takes none."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

_OF_FEW_VALUES = (bool, str, enum.Enum)
"""Types of arguments whose nested jit is cached; for others a new one is created in every call."""


def taking_anything(
    fn: Callable[..., Any], carried: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """`fn` under a nested jit, with the arguments that are not arrays bound to it.

    Numbers are arrays, as for JAX; `True` and `False` are not, because they select behaviour.

    Args:
        fn: takes pytrees of anything.
        carried: puts a function of arrays under the nested jit.
    """
    plain = carried(fn)
    known: dict[Hashable, Callable[..., Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        bound = {i: leaf for i, leaf in enumerate(leaves) if is_bound(leaf)}
        if not bound:
            return plain(*args, **kwargs)
        arrays = [leaf for i, leaf in enumerate(leaves) if i not in bound]
        key = tree, tuple((i, type(leaf), leaf) for i, leaf in bound.items())
        if not all(isinstance(leaf, _OF_FEW_VALUES) for leaf in bound.values()):
            return carried(_with_bound(fn, tree, bound))(*arrays)
        if key not in known:
            known[key] = carried(_with_bound(fn, tree, bound))
        return known[key](*arrays)

    return call


def _with_bound(fn: Callable[..., Any], tree: Any, bound: dict[int, Any]) -> Callable[..., Any]:
    def of_arrays(*arrays: Any) -> Any:
        rest = iter(arrays)
        leaves = [bound[i] if i in bound else next(rest) for i in range(tree.num_leaves)]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return fn(*args, **kwargs)

    return of_arrays


def is_bound(leaf: Any) -> bool:
    """Whether an argument is not an array, but is bound to the function."""
    if isinstance(leaf, bool):
        return True
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        return False
    try:
        jax.typeof(leaf)
    except (TypeError, ValueError):
        return True
    return False

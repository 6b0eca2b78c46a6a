"""Leaves of models that are not arrays, or have no gradients, and how libraries keep them apart."""

from __future__ import annotations

import dataclasses
import enum
import reprlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


def trainable_apart(model: Any, name: str) -> str:
    """How the library of a model separates arrays that are trained from its other leaves.

    Args:
        model: an object of the library, or any other pytree.
        name: of the model in the program.
    """
    if has_objects_of("flax.nnx", model):
        return (
            f"separate them: graph, params, rest = nnx.split({name}, nnx.Param, ...); differentiate by "
            "params, and call the model nnx.merge(graph, params, rest, copy=True) in the loss"
        )
    if has_objects_of("equinox", model):
        return (
            f"separate them: params, static = eqx.partition({name}, eqx.is_inexact_array); differentiate by "
            "params, and call the model eqx.combine(params, static) in the loss"
        )
    return "differentiate by trained arrays alone, such as state.params; the loss may close over the rest"


def has_objects_of(library: str, tree: Any) -> bool:
    """Whether some node of a pytree is of a class, or derives from one, that a library defines."""

    def is_one(value: Any) -> bool:
        return any(kind.__module__.startswith(library) for kind in type(value).__mro__)

    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


_STATIC = "let the step close over all but arrays, or give them as arguments that are static: static_argnames"
_APART = (
    "keep arrays apart: params, static = eqx.partition(model, eqx.is_array); the step takes params, and has "
    "the model again from eqx.combine(params, static)"
)


def other_than_array(leaf: Any, tree: Any) -> tuple[str, str]:
    """What a leaf of a pytree is that is not an array, and what to write instead, or ""."""
    if isinstance(leaf, np.ndarray):
        return f"of dtype {leaf.dtype}", ""
    kind = type(leaf).__name__
    if hasattr(leaf, "__jax_array__"):
        return f"a {kind}", f"give the array of each {kind}, such as variable.value"
    if isinstance(leaf, (str, bytes, type, enum.Enum)):
        return f"{reprlib.repr(leaf)}, a {kind}", _STATIC
    if callable(leaf):
        name = getattr(leaf, "__name__", "")
        return f"{name and f'{name}, '}a {kind}", _APART if has_objects_of("equinox", tree) else _STATIC
    if isinstance(leaf, Iterable):
        return f"a {kind}", f"make an array of the {kind}, as with jnp.stack(list(...))"
    if dataclasses.is_dataclass(leaf):
        return f"a {kind}", f"make it a pytree: jax.tree_util.register_dataclass({kind})"
    register = f"make it a pytree, as with jax.tree_util.register_pytree_with_keys_class on {kind}"
    return f"a {kind}", f"{register}; or {_STATIC}"

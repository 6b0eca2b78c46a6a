"""Small programs that a GPU runs first: what they compute, on what, and how close to XLA it must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COUNT, WIDTH, STEP = 30, 64, 0.1
LOOSER = 10  # than the tests, whose sums are exact to f64
MODELS = ("mlp", "transformer", "tied", "dropout", "checkpointed", "shapes_change")


@dataclasses.dataclass(frozen=True)
class SmokeProgram:
    """A program with its arguments.

    Attributes:
        donated: how many of the first arguments are given away.
        tolerance: of the largest difference, over the largest value of a result if that is above 1.
    """

    name: str
    function: Callable[..., list[Any]]
    arguments: Sequence[np.ndarray]
    donated: int = 0
    tolerance: float = 1e-4


def chain(x: Any, w: Any) -> list[Any]:
    """Sixty launches, each of which needs the last."""
    for _ in range(COUNT):
        x = jnp.tanh(x @ w)
    return [x]


def loop(x: Any, w: Any) -> list[Any]:
    """As often as a number on the device says."""

    def longer(state: Any) -> Any:
        return jnp.abs(state[1]).max() > 1e-3

    return list(jax.lax.while_loop(longer, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w) / 2), (jnp.int32(0), x)))


def donation(x: Any, y: Any) -> list[Any]:
    """A result in the memory of an argument that another result needs, too."""
    return [x + y, jnp.flip(x, 0) * y]


def smoke_programs(models: Sequence[str] = MODELS) -> list[SmokeProgram]:
    """The programs, the smallest first."""
    x, w = (np.random.default_rng(0).standard_normal((2, WIDTH, WIDTH)) / 8).astype(np.float32)
    found = [
        SmokeProgram("chain", chain, (x, w)),
        SmokeProgram("donation", donation, (x, w), donated=1, tolerance=1e-6),
        SmokeProgram("loop", loop, (x, w)),
    ]
    return [*found, *map(_training, models)]


def _training(name: str) -> SmokeProgram:
    """A step of gradient descent of one of the tests' models."""
    from examples.workloads.models import MODELS as ALL

    params, loss, batch = ALL[name].build(2)
    leaves, tree = jax.tree.flatten(params)
    count = len(leaves)

    def step(*given: Any) -> list[Any]:
        params = jax.tree.unflatten(tree, given[:count])
        value, gradients = jax.value_and_grad(loss)(params, *given[count:])
        return [p - STEP * g for p, g in zip(given, jax.tree.leaves(gradients))] + [value]

    arguments = [np.asarray(jnp.asarray(a)) for a in (*leaves, *batch)]
    return SmokeProgram(name, step, arguments, count, LOOSER * ALL[name].tolerance)

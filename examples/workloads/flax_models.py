"""Models of flax whose modules name their own submodules; builders as in `models`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import mpmd
from examples.workloads.models import D, Model, regression_batch, square


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.Dense(D)(linen.LayerNorm()(x)))


class LinenStack(linen.Module):
    """Names its blocks where it calls them."""

    stages: int

    @linen.compact
    def __call__(self, x):
        for s in range(self.stages):
            x = mpmd.named_computation(LinenBlock(name=f"block{s}"), name=f"stage{s}")(x)
        return x


def linen_modules(stages: int) -> Any:
    """A linen module that names its submodules; the parameters of `init` are those of `apply`."""
    model, batch = LinenStack(stages), regression_batch()
    params = jax.tree.map(np.asarray, model.init(jax.random.key(1), batch[0])["params"])

    def loss(params, x, y):
        return square(model.apply({"params": params}, x), y)

    return params, loss, batch


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.dense = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(self.norm(x)))


class NnxStack(nnx.Module):
    """Names its blocks where it calls them."""

    def __init__(self, stages, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(stages)])

    def __call__(self, x):
        for s, block in enumerate(self.blocks):
            x = mpmd.named_computation(block, name=f"stage{s}")(x)
        return x


def nnx_modules(stages: int) -> Any:
    """An nnx module that names its submodules, split into its structure and its parameters."""
    structure, params = nnx.split(NnxStack(stages, nnx.Rngs(1)))
    params = jax.tree.map(np.asarray, params)

    def loss(params, x, y):
        return square(nnx.merge(structure, params)(x), y)

    return params, loss, regression_batch()


FLAX_MODELS = {m.name: m for m in (Model("linen_modules", linen_modules), Model("nnx_modules", nnx_modules))}

"""Models without names, whose stages are given from outside: builders of `(params, loss, batch, pattern)`."""

from __future__ import annotations

from typing import Any

import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.support.models import SEQ, VOCAB, D, normal, regression_batch, square, token_batch

LAYERS = 4


def block(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * p["scale"]
    return x + jnp.tanh(normed @ p["w"] + p["b"])


def block_params(seed: int, *layers: int) -> dict[str, np.ndarray]:
    return {
        "w": normal(seed, *layers, D, D),
        "b": normal(seed + 1, *layers, D),
        "scale": 1 + normal(seed + 2, *layers, D),
    }


def entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def token_params(layers: Any) -> dict[str, Any]:
    return {
        "embed": normal(1, VOCAB, D),
        "pos": normal(2, SEQ, D),
        "layers": layers,
        "head": normal(3, D, VOCAB),
    }


def separate(around: Any = lambda f: f) -> Any:
    """A list of layers between an embedding and a head."""

    def loss(params, ids, targets):
        x = params["embed"][ids] + params["pos"]
        for p in params["layers"]:
            x = around(block)(p, x)
        return entropy(x @ params["head"], targets)

    layers = [block_params(10 * i) for i in range(LAYERS)]
    return token_params(layers), loss, token_batch(), r"layers/(\d+)"


def rematerialised_layers() -> Any:
    return separate(jax.checkpoint)


def rematerialised_loss() -> Any:
    params, loss, batch, pattern = separate()
    return params, jax.checkpoint(loss), batch, pattern


class LinenLayer(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return x + flax.linen.Dense(D)(jnp.tanh(flax.linen.Dense(D)(flax.linen.LayerNorm()(x))))


class LinenNet(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.Dense(D, name="inward")(x)
        for i in range(LAYERS):
            x = LinenLayer(name=f"layers_{i}")(x)
        return flax.linen.Dense(D, name="outward")(x)


def linen_layers() -> Any:
    model, batch = LinenNet(), regression_batch()
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), batch[0]))
    return params, lambda p, x, y: square(model.apply(p, x), y), batch, r"layers_(\d+)"


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(jnp.tanh(self.inner(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.inward, self.outward = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x)
        return self.outward(x)


def nnx_layers() -> Any:
    definition, params = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param)
    params = jax.tree.map(np.asarray, params)

    def loss(params, x, y):
        return square(nnx.merge(definition, params)(x), y)

    return params, loss, regression_batch(), r"layers/(\d+)"


def haiku_layers() -> Any:
    def forward(x):
        x = hk.Linear(D, name="inward")(x)
        for i in range(LAYERS):
            x = x + jnp.tanh(hk.Linear(D, name=f"layer_{i}")(x))
        return hk.Linear(D, name="outward")(x)

    net, batch = hk.transform(forward), regression_batch()
    params = jax.tree.map(np.asarray, net.init(jax.random.key(0), batch[0]))
    return params, lambda p, x, y: square(net.apply(p, None, x), y), batch, r"layer_(\d+)"


SEPARATE = {
    f.__name__: f
    for f in (separate, rematerialised_layers, rematerialised_loss, linen_layers, nnx_layers, haiku_layers)
}

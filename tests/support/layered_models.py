"""Models without names, whose stages are given from outside: builders of `(params, loss, batch, pattern)`."""

from __future__ import annotations

from typing import Any

import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.workloads.models import (
    SEQ,
    VOCAB,
    D,
    normal,
    regression_batch,
    square,
    token_batch,
)

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


def scanned(around: Any = lambda f: f, *, layer: Any = block, layers: int = LAYERS, **how: Any) -> Any:
    """Stacked layers, run by a scan, between an embedding and a head."""

    def loss(params, ids, targets):
        def body(x, p):
            return layer(p, x), None

        x, _ = jax.lax.scan(around(body), params["embed"][ids] + params["pos"], params["layers"], **how)
        return entropy(x @ params["head"], targets)

    return token_params(block_params(20, layers)), loss, token_batch(), "layers"


def sliced(how: str = "in order", order: Any = range(LAYERS)) -> Any:
    """Stacked layers, whose rows a loop of Python slices."""

    def rows_of(layers):
        if how == "unstacked":
            return [dict(zip(layers, of)) for of in zip(*(jnp.unstack(a) for a in layers.values()))]
        return [{k: a[i] for k, a in layers.items()} for i in range(LAYERS)]

    def loss(params, ids, targets):
        layers, x = params["layers"], params["embed"][ids] + params["pos"]
        if how == "cast":
            layers = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), layers)
        rows = rows_of(layers)
        for i in order:
            x = (jax.checkpoint(block) if how == "unstacked" else block)(rows[i], x)
        decay = sum((a**2).sum() for a in layers.values()) if how == "decayed" else 0.0
        return entropy(x @ params["head"], targets) + 1e-3 * decay

    return token_params(block_params(20, LAYERS)), loss, token_batch(), "layers"


def rematerialised_scan() -> Any:
    params, loss, batch, pattern = scanned(jax.checkpoint)
    return params, jax.checkpoint(loss), batch, pattern


def reversed_scan() -> Any:
    return scanned(reverse=True)


def unrolled_scan() -> Any:
    return scanned(unroll=2)


def nested_scan() -> Any:
    """Each layer is a scan of its own, over inner layers."""

    def layer(p, x):
        inner = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), p)
        return jax.lax.scan(lambda h, q: (block(q, h), None), x, inner)[0]

    return scanned(layer=layer)


def half_precision_stack() -> Any:
    """The whole stack is cast before the scan."""
    params, loss, batch, pattern = scanned()

    def in_half(params, *batch):
        layers = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), params["layers"])
        return loss({**params, "layers": layers}, *batch)

    return params, in_half, batch, pattern


def shared_and_auxiliary() -> Any:
    """A weight that all layers read, and a result of each layer."""

    def loss(params, ids, targets):
        def body(x, p):
            x = block(p, x) + jnp.tanh(x @ params["shared"])
            return x, jnp.mean(x**2)

        x, sizes = jax.lax.scan(body, params["embed"][ids], params["layers"])
        return entropy(x @ params["head"], targets) + 1e-2 * sizes.mean()

    params = token_params(block_params(20, LAYERS)) | {"shared": normal(4, D, D)}
    return params, loss, token_batch(), "layers"


def decayed_scan() -> Any:
    """Sums over the whole stack inside of the loss: a decay of all weights, and a norm of some."""
    params, loss, batch, pattern = scanned()

    def with_decay(params, *batch):
        squares = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params))
        flat = params["layers"]["w"].reshape(-1)
        return loss(params, *batch) + 1e-3 * squares + 1e-2 * jnp.sqrt(jnp.vdot(flat, flat))

    return params, with_decay, batch, pattern


class LinenScanned(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.Dense(D, name="inward")(x)
        stack = flax.linen.scan(
            flax.linen.remat(LinenRow, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = stack(name="layers")(x, None)
        return flax.linen.Dense(D, name="outward")(x)


class LinenRow(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x, _):
        return LinenLayer(name="layer")(x), None


def linen_scan() -> Any:
    model, batch = LinenScanned(), regression_batch()
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), batch[0]))
    return params, lambda p, x, y: square(model.apply(p, x), y), batch, "layers"


class NnxScanned(nnx.Module):
    def __init__(self, rngs):
        self.inward, self.outward = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.layers = nnx.vmap(NnxLayer, in_axes=0, out_axes=0)(rngs.fork(split=LAYERS))

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.outward(run(self.inward(x), self.layers))


def nnx_scan() -> Any:
    definition, params = nnx.split(NnxScanned(nnx.Rngs(0)), nnx.Param)
    params = jax.tree.map(np.asarray, params)

    def loss(params, x, y):
        return square(nnx.merge(definition, params)(x), y)

    return params, loss, regression_batch(), "layers"


SCANNED = {
    f.__name__: f
    for f in (
        scanned, rematerialised_scan, reversed_scan, unrolled_scan, nested_scan, half_precision_stack,
        shared_and_auxiliary, decayed_scan, linen_scan, nnx_scan,
    )
}  # fmt: skip

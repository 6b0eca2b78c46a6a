"""Training steps on one mesh for each process, whose forecasts are compared with measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

LAYERS, MICROBATCHES, VOCABULARY, HEAD = 8, 8, 512, 64


def job_of(model: str, width: int, rows: int) -> tuple[Any, Callable[[], Any], tuple[Any, ...]]:
    """A step with momentum, what makes its state, and a batch.

    Args:
        model: `"mlp"`, or `"transformer"` of 128 tokens a row.
        width: of the model.
        rows: of the batch.
    """
    meshes = max(2, jax.process_count())
    topology = mpmd.make_topology({f"m{k}": 1 for k in range(meshes)})
    config = mpmd.make_config(topology, stages="auto", schedule="1f1b")
    loss, weights, batch = (_mlp if model == "mlp" else _transformer)(width, rows)

    @mpmd.jit(config, donate_argnums=0)
    def train_step(state: Any, x: Any, y: Any) -> Any:
        params, momentum = state
        value, grads = mpmd.accumulate_gradients(loss, num_microbatches=MICROBATCHES)(params, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return (jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum), value

    def init() -> Any:
        params = weights(jax.random.key(0))
        return params, jax.tree.map(jnp.zeros_like, params)

    return train_step, init, batch


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def _matrix(key: Any, rows: int, columns: int, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(key, (rows, columns)) * rows**-0.5


def _mlp(width: int, rows: int) -> Any:
    def loss(params: Any, x: Any, y: Any) -> Any:
        for up, down in params:
            x = x + jax.nn.gelu(_norm(x) @ up) @ down
        return ((x - y) ** 2).mean()

    def weights(key: Any) -> Any:
        keys = jax.random.split(key, 2 * LAYERS)
        pairs = zip(keys[::2], keys[1::2], strict=True)
        return [(_matrix(a, width, 4 * width), _matrix(b, 4 * width, width, 0.1)) for a, b in pairs]

    x = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    return loss, weights, (x, 2 * x)


def _transformer(width: int, rows: int) -> Any:
    def attention(w: Any, x: Any) -> Any:
        q, k, v = (a.reshape(*x.shape[:2], -1, HEAD) for a in jnp.split(x @ w["qkv"], 3, -1))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x = params["embed"][tokens]
        for w in params["layers"]:
            x = x + attention(w, _norm(x))
            x = x + jax.nn.gelu(_norm(x) @ w["up"]) @ w["down"]
        logits = _norm(x) @ params["head"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()

    def weights(key: Any) -> Any:
        def layer(key: Any) -> Any:
            a, b, c, d = jax.random.split(key, 4)
            return {
                "qkv": _matrix(a, width, 3 * width),
                "out": _matrix(b, width, width, 0.1),
                "up": _matrix(c, width, 4 * width),
                "down": _matrix(d, 4 * width, width, 0.1),
            }

        first, last, *keys = jax.random.split(key, LAYERS + 2)
        embed, head = _matrix(first, VOCABULARY, width), _matrix(last, width, VOCABULARY)
        return {"embed": embed, "layers": [layer(k) for k in keys], "head": head}

    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (rows, 129), np.int32)
    return loss, weights, (tokens[:, :-1], tokens[:, 1:])

"""A training step of a transformer without names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def transformer_step():
    """A two-layer transformer with attention, its gradient and AdamW, abstract."""
    d, heads, layers, vocabulary = 32, 2, 2, 50
    rng = np.random.default_rng(0)

    def block(w, x):
        q, k, v = (jnp.reshape(p, (*x.shape[:2], heads, -1)) for p in jnp.split(x @ w["qkv"], 3, -1))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(jax.nn.standardize(x) @ w["up"]) @ w["down"]

    def loss(params, tokens, key):
        x = params["embed"][tokens]
        x, _ = jax.lax.scan(lambda h, w: (jax.checkpoint(block)(w, h), None), x, params["layers"])
        x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1).mean()

    def step(params, moments, tokens, seed):
        value, grads = jax.value_and_grad(loss)(params, tokens, jax.random.key(seed))
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
        params = jax.tree.map(lambda p, m: p - 1e-3 * m / (jnp.sqrt(m * m) + 1e-8), params, moments)
        return params, moments, value

    def weights(*dims):
        return (rng.standard_normal(dims) * 0.02).astype(np.float32)

    sizes = {
        "qkv": (layers, d, 3 * d),
        "out": (layers, d, d),
        "up": (layers, d, 4 * d),
        "down": (layers, 4 * d, d),
    }
    params = {"embed": weights(vocabulary, d), "layers": {n: weights(*s) for n, s in sizes.items()}}
    tokens = rng.integers(0, vocabulary, (2, 16)).astype(np.int32)
    return step, (params, jax.tree.map(np.zeros_like, params), tokens, np.int32(3))

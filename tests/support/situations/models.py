"""Small models that situations share."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

WIDTH, LAYERS, ROWS, CLASSES, WORDS = 8, 4, 8, 5, 16
MICROBATCHES = 4
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
ADAM = optax.adam(1e-2, eps=1e-3)
"""A larger `eps`: gradients that are zero but for rounding do not become steps."""


def updated(params, moments, grads, tx=ADAM):
    """The parameters and moments behind an update."""
    updates, moments = tx.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments


class Residual(nn.Module):
    """Dense layers with the names `layer_0` to `layer_3`, and a head."""

    outputs: int = CLASSES
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="embed", dtype=self.dtype)(x)
        for number in range(LAYERS):
            y = nn.gelu(nn.Dense(WIDTH, name=f"layer_{number}", dtype=self.dtype)(x))
            x = x + nn.Dropout(self.dropout, deterministic=not self.dropout)(y)
        return nn.Dense(self.outputs, name="head", dtype=self.dtype)(x)


def classified(model=None):
    """Parameters, loss and batch of a classification; `loss(params, x, labels)`."""
    model = model or Residual()
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    labels = jnp.arange(ROWS) % CLASSES
    params = model.init(jax.random.key(0), x)["params"]

    def loss(params, x, labels):
        return cross_entropy(model.apply({"params": params}, x), labels).mean()

    return params, loss, (x, labels)


class Causal(nn.Module):
    """A transformer with the names `layer_0` to `layer_3`."""

    tied: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, ids, mask=None):
        embed = nn.Embed(WORDS, WIDTH, name="embed")
        x = embed(ids)
        mask = nn.make_causal_mask(ids) if mask is None else mask
        for number in range(LAYERS):
            x = CausalBlock(self.dropout, name=f"layer_{number}")(x, mask)
        return embed.attend(x) if self.tied else nn.Dense(WORDS, name="head")(x)


class CausalBlock(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False)(y, mask=mask)
        y = nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.dropout, deterministic=not self.dropout)(y)


def tokens(rows=ROWS, length=6):
    """Token ids `i32[rows,length]`, none of them 0."""
    return jax.random.randint(jax.random.key(2), (rows, length), 1, WORDS)


def dense(key, *sizes):
    """Weights of dense layers, without biases."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [jax.random.normal(k, (a, b)) / a**0.5 for k, a, b in zip(keys, sizes, sizes[1:], strict=False)]


def multilayer(weights, x):
    """Dense layers with tanh between them."""
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return x @ weights[-1]

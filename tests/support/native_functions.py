"""Functions whose fragments tests compile natively, and random numbers for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Floats:
    """Normally distributed numbers; `tests/unit/compile/conftest.py` begins again before every test."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Draw the same numbers again."""
        self.generator = np.random.default_rng(0)

    def __call__(self, *shape: int, dtype: Any = np.float32) -> np.ndarray:
        """An array of numbers not drawn before."""
        return np.asarray(self.generator.standard_normal(shape), np.float32).astype(dtype)


def layer_norm(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale + shift


def attention(x, w, out):
    q, k, v = jnp.split(x @ w, 3, -1)
    b, t, d = q.shape
    q, k, v = (a.reshape(b, t, 2, d // 2).transpose(0, 2, 1, 3) for a in (q, k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(d // 2)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
    return x + mixed.transpose(0, 2, 1, 3).reshape(b, t, d) @ out


def gradients(function):
    def both(*arguments):
        value, pull = jax.vjp(function, *arguments)
        return value, pull(jnp.cos(value.astype(jnp.float32)).astype(value.dtype))

    return both

"""A block of a Llama, and a training step scanned over some; experts of sorted rows, by `ragged_dot`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROTATION = 500_000.0
"""The base of the angles by which queries and keys are turned."""


@dataclasses.dataclass(frozen=True)
class LlamaSize:
    """Sizes of the model; by default those of Llama 3 8B, with four layers."""

    batch: int = 1
    tokens: int = 4096
    width: int = 4096
    heads: int = 32
    groups: int = 8
    inner: int = 14336
    layers: int = 4
    vocabulary: int = 128256

    @property
    def head(self) -> int:
        """Columns of a head."""
        return self.width // self.heads


def layer_shapes(size: LlamaSize) -> list[tuple[int, ...]]:
    """Two norms, queries, keys and values, the output, gate and up, down."""
    d, kept = size.width, size.groups * size.head
    return [(d,), (d, d + 2 * kept), (d, d), (d,), (d, 2 * size.inner), (size.inner, d)]


def block(size: LlamaSize, x: Any, *p: Any) -> Any:
    """Attention with fewer keys than queries, and a gated product."""
    x = x + _attention(size, _norm(x, p[0]), p[1]) @ p[2]
    gate, up = jnp.split(_norm(x, p[3]) @ p[4], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ p[5]


def loss(size: LlamaSize, p: list[Any], tokens: Any, labels: Any) -> Any:
    """Of a model whose layers are stacked: table, last norm, then the layers' arrays."""
    table, scale, *stacked = p
    narrow = table.astype(jnp.bfloat16)

    def layer(x: Any, given: list[Any]) -> tuple[Any, None]:
        return block(size, x, *(a.astype(jnp.bfloat16) for a in given)), None

    x, _ = jax.lax.scan(layer, narrow[tokens], stacked)
    logits = (_norm(x, scale) @ narrow.T).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def ragged_experts(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Two of several experts for each row: rows are sorted by expert and multiplied group by group."""
    rows = x.reshape(-1, x.shape[-1])
    best, which = jax.lax.top_k(jax.nn.softmax((rows @ router).astype(jnp.float32)), 2)
    order = jnp.argsort(which.reshape(-1))
    sizes = jnp.bincount(which.reshape(-1), length=router.shape[1])
    inner = jax.nn.silu(jax.lax.ragged_dot(rows[order // 2], up, sizes))
    found = jax.lax.ragged_dot(inner, down, sizes)[jnp.argsort(order)]
    chosen = found.reshape(*which.shape, -1) * best[..., None].astype(x.dtype)
    return chosen.sum(1).reshape(x.shape)


def _norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


def _attention(size: LlamaSize, x: Any, w: Any) -> Any:
    b, t, d = x.shape
    kept = size.groups * size.head
    parts = jnp.split(x @ w, [d, d + kept], -1)
    q, k, v = (a.reshape(b, t, -1, size.head) for a in parts)
    turned = functools.partial(_turned, _angles(size))
    return jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True).reshape(b, t, d)


def _angles(size: LlamaSize) -> np.ndarray:
    half = size.head // 2
    turns = _ROTATION ** (-np.arange(half, dtype=np.float32) / half)
    return np.outer(np.arange(size.tokens, dtype=np.float32), turns)[:, None]


def _turned(angles: np.ndarray, x: Any) -> Any:
    """Pairs of columns, turned by the position."""
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    c, s = np.cos(angles), np.sin(angles)
    return jnp.concatenate([first * c - second * s, second * c + first * s], -1).astype(x.dtype)

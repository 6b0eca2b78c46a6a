"""A model as Llama is: RMSNorm, grouped queries, rotary positions, SwiGLU, and all layers in one scan.

Nothing here knows of a pipeline.  Source: Touvron et al., 2023; Ainslie et al., 2023 (grouped queries); Su et
al., 2021 (rotary positions); Shazeer, 2020 (SwiGLU).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Llama:
    """The sizes of a model; parameters are f32, layers compute in `dtype`, with `checkpoint` twice."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    dtype: str = "bfloat16"
    checkpoint: bool = False

    def init(self, key: jax.Array) -> Any:
        """Fresh parameters, those of all layers stacked."""
        keys = iter(jax.random.split(key, 9))
        small = 0.02 / (2 * self.layers) ** 0.5  # where a branch is added to the residual (GPT-2)

        def normal(*shape: int, scale: float = 0.02) -> jax.Array:
            return scale * jax.random.normal(next(keys), shape)

        stack, head = (self.layers, self.width), self.width // self.heads
        return {
            "embed": normal(self.vocab, self.width),
            "layers": {
                "attention_norm": jnp.ones(stack),
                "q": normal(*stack, self.heads, head),
                "k": normal(*stack, self.kv_heads, head),
                "v": normal(*stack, self.kv_heads, head),
                "o": normal(self.layers, self.heads, head, self.width, scale=small),
                "mlp_norm": jnp.ones(stack),
                "gate": normal(*stack, self.hidden),
                "up": normal(*stack, self.hidden),
                "down": normal(self.layers, self.hidden, self.width, scale=small),
            },
            "norm": jnp.ones(self.width),
            "head": normal(self.width, self.vocab),
        }

    def logits(self, params: Any, ids: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        """Of the next token: f32[batch, length, vocab].  A token sees those before it in its own segment."""
        order = jnp.arange(ids.shape[1])
        seen = (segments[:, :, None] == segments[:, None, :]) & (order[:, None] >= order)
        size = self.width // self.heads
        angles = positions[:, :, None, None] * 10_000.0 ** (-jnp.arange(0, size, 2) / size)

        def layer(x: jax.Array, masters: Any) -> tuple[jax.Array, None]:
            w = jax.tree.map(lambda leaf: leaf.astype(self.dtype), masters)
            h = _normalised(x, w["attention_norm"])
            q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in "qkv")
            q, k = _rotated(q, angles), _rotated(k, angles)
            attended = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])
            x = x + jnp.einsum("bthk,hkd->btd", attended, w["o"])
            h = _normalised(x, w["mlp_norm"])
            return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

        run = jax.checkpoint(layer) if self.checkpoint else layer
        x, _ = jax.lax.scan(run, params["embed"].astype(self.dtype)[ids], params["layers"])
        x = _normalised(x, params["norm"].astype(self.dtype))
        return jnp.matmul(x, params["head"].astype(self.dtype), preferred_element_type=jnp.float32)

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """The sum of the losses of all tokens that count, and how many do: padding is segment 0."""
        logits = self.logits(params, batch["ids"], batch["segments"], batch["positions"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        counts = batch["segments"] > 0
        return (losses * counts).sum(), counts.sum()


def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm, whose mean is taken in f32."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def _rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Queries or keys, `[batch, length, heads, size]`, each pair of features turned by its angle."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

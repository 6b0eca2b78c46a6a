"""The reference GPT of the step benchmarks: 6.8 M parameters in four stages, plain JAX.

8 layers, d=256, 8 heads, sequence 128, vocabulary 1024, microbatch 4, 8 microbatches, Adam, f32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a step."""

    layers: int = 8
    width: int = 256
    heads: int = 8
    sequence: int = 128
    vocabulary: int = 1024
    microbatch: int = 4
    microbatches: int = 8
    stages: int = 4


def init(sizes: Sizes, seed: int = 0) -> dict[str, Any]:
    """Parameters as host arrays: `stages` lists of blocks, the embedding and the head."""
    rng = np.random.default_rng(seed)
    d = sizes.width

    def normal(*dims: int) -> np.ndarray:
        return (rng.normal(size=dims) / np.sqrt(dims[0])).astype(np.float32)

    def block() -> dict[str, np.ndarray]:
        return {
            "qkv": normal(d, 3 * d),
            "out": normal(d, d),
            "up": normal(d, 4 * d),
            "down": normal(4 * d, d),
            "scale1": np.ones(d, np.float32),
            "scale2": np.ones(d, np.float32),
        }

    per_stage = sizes.layers // sizes.stages
    return {
        "blocks": [[block() for _ in range(per_stage)] for _ in range(sizes.stages)],
        "embed": rng.normal(size=(sizes.vocabulary, d)).astype(np.float32) * 0.02,
        "position": rng.normal(size=(sizes.sequence, d)).astype(np.float32) * 0.02,
        "head": normal(d, sizes.vocabulary),
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def run_blocks(blocks: Any, x: jax.Array, heads: int) -> jax.Array:
    """Blocks one after the other on f32[batch,sequence,width]."""
    b, t, d = x.shape
    mask = jnp.tril(jnp.ones((t, t), bool))
    for p in blocks:
        qkv = (norm(x, p["scale1"]) @ p["qkv"]).reshape(b, t, 3, heads, d // heads)
        q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(d // heads)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, v).transpose(0, 2, 1, 3).reshape(b, t, d)
        x = x + mixed @ p["out"]
        x = x + jax.nn.gelu(norm(x, p["scale2"]) @ p["up"]) @ p["down"]
    return x


def make_step(sizes: Sizes) -> tuple[Any, Any]:
    """`(step, optimizer)`; `step(params, opt_state, tokens, labels) -> (params, opt_state, loss)`."""
    optimizer = optax.adam(1e-3)
    last = sizes.stages - 1

    def first_stage(blocks: Any, embed: Any, position: Any, tokens: Any) -> Any:
        return run_blocks(blocks, embed[tokens] + position, sizes.heads)

    def last_stage(blocks: Any, head: Any, x: Any, labels: Any) -> Any:
        logits = run_blocks(blocks, x, sizes.heads) @ head
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def loss_fn(params: Any, tokens: Any, labels: Any) -> Any:
        def named(fn: Any, s: int) -> Any:
            return mpmd.named_computation(fn, name=f"stage{s}")

        x = named(first_stage, 0)(params["blocks"][0], params["embed"], params["position"], tokens)
        for s in range(1, last):
            x = named(lambda blocks, x: run_blocks(blocks, x, sizes.heads), s)(params["blocks"][s], x)
        return named(last_stage, last)(params["blocks"][last], params["head"], x, labels)

    def step(params: Any, opt_state: Any, tokens: Any, labels: Any) -> Any:
        loss, grads = mpmd.accumulate_gradients(loss_fn, sizes.microbatches)(params, tokens, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, optimizer


def batch(sizes: Sizes, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and labels, s32[microbatches * microbatch, sequence] each."""
    rng = np.random.default_rng(seed)
    size = (sizes.microbatch * sizes.microbatches, sizes.sequence)
    return tuple(rng.integers(0, sizes.vocabulary, size).astype(np.int32) for _ in range(2))  # type: ignore[return-value]

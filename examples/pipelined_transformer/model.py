"""A GPT in flax, whose pipeline stages are pure functions of the parameters they need.

Shapes: `batch` sequences of `seq` tokens, vectors of `d`, `heads` of `d / heads`, `vocab` tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from examples.pipelined_transformer.config import TrainConfig

Params = dict[str, Any]
Stage = Callable[..., jax.Array]


class CausalAttention(nn.Module):
    """Causal self-attention: `[batch, seq, d]` to the same."""

    config: TrainConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=config.dtype)
        heads = (config.heads, config.d_model // config.heads)
        query, key, value = (
            dense(heads, kernel_init=_normal(), name=name)(x) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * heads[1] ** -0.5
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        scores = jnp.where(seen, scores.astype(jnp.float32), -1e30)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return dense(config.d_model, axis=(-2, -1), kernel_init=_residual(config), name="out")(mixed)


class TransformerBlock(nn.Module):
    """Attention and a two-layer network, each behind a layer norm and around a residual."""

    config: TrainConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        x = x + CausalAttention(config, name="attention")(_layer_norm(config, "attention_norm")(x))
        hidden = nn.Dense(4 * config.d_model, dtype=config.dtype, kernel_init=_normal(), name="up")(
            _layer_norm(config, "mlp_norm")(x)
        )
        down = nn.Dense(config.d_model, dtype=config.dtype, kernel_init=_residual(config), name="down")
        return x + down(jax.nn.gelu(hidden))


class GPT(nn.Module):
    """Tokens to next-token logits.  The output embedding is the input embedding."""

    config: TrainConfig

    def setup(self) -> None:
        config = self.config
        embed = functools.partial(nn.Embed, features=config.d_model, embedding_init=_normal())
        self.tokens = embed(config.vocab_size)
        self.positions = embed(config.seq_len)
        if config.scan:
            self.blocks = TransformerBlock(config)
        else:
            self.blocks = [TransformerBlock(config, name=f"block_{i}") for i in range(config.layers)]
        self.final_norm = _layer_norm(config, None)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`i32[batch, seq]` to logits `f32[batch, seq, vocab]`."""
        run = self.scan_blocks if self.config.scan else self.run_blocks
        return self.logits(run(self.embed(tokens), range(self.config.layers)))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """`i32[batch, seq]` to `[batch, seq, d]`."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        return x.astype(self.config.dtype)

    def run_blocks(self, x: jax.Array, blocks: range) -> jax.Array:
        """`[batch, seq, d]` through some of the blocks."""
        for index in blocks:
            x = self.blocks[index](x)
        return x

    def scan_blocks(self, x: jax.Array, blocks: range) -> jax.Array:
        """`[batch, seq, d]` through all blocks, whose parameters are stacked along dim 0."""
        each = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": len(blocks)}
        x, _ = nn.scan(lambda block, x: (block(x), None), **each)(self.blocks, x)
        return x

    def logits(self, x: jax.Array) -> jax.Array:
        """`[batch, seq, d]` to `f32[batch, seq, vocab]`."""
        table = self.tokens.embedding.astype(x.dtype)
        return jnp.einsum("bsd,vd->bsv", self.final_norm(x), table).astype(jnp.float32)


def init_params(config: TrainConfig, seed: int) -> Params:
    """Fresh parameters."""
    tokens = jnp.zeros((1, config.seq_len), jnp.int32)
    return GPT(config).init(jax.random.key(seed), tokens)["params"]


def mean_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy per token, in nats: `f32[]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def loss_of(config: TrainConfig, params: Params, batch: jax.Array) -> jax.Array:
    """The loss of the whole model on `i32[batch, seq + 1]`."""
    return mean_loss(GPT(config).apply({"params": params}, batch[:, :-1]), batch[:, 1:])


def stage_params(config: TrainConfig, params: Params, stage: int) -> Params:
    """The part of the parameters that a stage reads.  The first and the last both read the token table."""
    names = [f"block_{index}" for index in config.blocks_of(stage)]
    if stage == 0:
        names += ["tokens", "positions"]
    if stage == config.num_stages - 1:
        names += ["tokens", "final_norm"]
    return {name: params[name] for name in sorted(set(names))}


def stage_function(config: TrainConfig, stage: int) -> Stage:
    """A stage as a pure function `(stage_params, x, batch)`.

    `x` is what the stage before returned, and is left out by the first; `batch` is `i32[batch, seq + 1]`,
    and is read by the first stage, for its inputs, and by the last, which returns the loss.
    """
    first, last = stage == 0, stage == config.num_stages - 1

    def forward(model: GPT, x: Any, batch: Any) -> jax.Array:
        if first:
            x = model.embed(batch[:, :-1])
        x = model.run_blocks(x, config.blocks_of(stage))
        return mean_loss(model.logits(x), batch[:, 1:]) if last else x

    def run(params: Params, x: jax.Array | None = None, batch: jax.Array | None = None) -> jax.Array:
        return GPT(config).apply({"params": params}, x, batch, method=forward)

    return run


def _layer_norm(config: TrainConfig, name: str | None) -> nn.LayerNorm:
    return nn.LayerNorm(dtype=config.dtype, name=name)


def _normal(scale: float = 1.0) -> Any:
    return nn.initializers.normal(0.02 * scale)


def _residual(config: TrainConfig) -> Any:
    """Smaller where many residual branches add up.  Source: GPT-2 (Radford et al., 2019), section 2.3."""
    return _normal((2 * config.layers) ** -0.5)

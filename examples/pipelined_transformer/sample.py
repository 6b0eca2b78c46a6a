"""Text from a trained model, token by token, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from examples.pipelined_transformer.config import TrainConfig
from examples.pipelined_transformer.model import GPT, Params
from examples.pipelined_transformer.tokenizer import Tokenizer

TEMPERATURE = 0.7


def generate(config: TrainConfig, params: Params, tokenizer: Tokenizer, prompt: str) -> str:
    """The prompt and `config.sample_tokens` tokens after it; the same for the same seed.

    Each token costs a forward pass over a window of `seq_len` tokens: there is no cache.
    """

    @jax.jit
    def next_token(window: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits = GPT(config).apply({"params": params}, window[None])[0, last]
        return jax.random.categorical(key, logits / TEMPERATURE)

    tokens = tokenizer.encode(prompt.encode()).tolist()
    for key in jax.random.split(jax.random.key(config.seed), config.sample_tokens):
        seen = tokens[-config.seq_len :]
        window = np.zeros(config.seq_len, np.int32)  # what follows `seen` is masked by causality
        window[: len(seen)] = seen
        tokens.append(int(next_token(window, jnp.int32(len(seen) - 1), key)))
    return tokenizer.decode(tokens)

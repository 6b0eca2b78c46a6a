"""Losses, without names, of models with several inputs or heads: towers, encoder and decoder, further tokens.

A builder gives `(params, loss_fn, batch)`: the loss takes `(params, *microbatch)`, the batch has 8 rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.workloads.models import ROWS, VOCAB, normal

WIDTH, WORDS, PATCHES = 8, 6, 4


def tokens(seed: int, length: int = WORDS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (ROWS, length), np.int32)


def _matrix(seed: int, rows: int = WIDTH, columns: int = WIDTH) -> np.ndarray:
    return normal(seed, rows, columns)


def _attend(w: Any, x: jax.Array, memory: jax.Array) -> jax.Array:
    scores = jnp.einsum("...qd,...kd->...qk", x @ w, memory) / WIDTH**0.5
    return x + jax.nn.softmax(scores) @ memory


def _layer(w: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def two_encoders(layers: int = 2, in_turns: bool = False) -> tuple[Any, Any, Any]:
    """CLIP: images and texts, encoded alone and compared with each other.

    Args:
        layers: of each encoder.
        in_turns: the program computes a layer of one encoder, then one of the other.
    """
    params = {
        "vision": [_matrix(k) for k in range(layers)],
        "text": [_matrix(10 + k) for k in range(layers)],
        "words": _matrix(20, VOCAB),
        "scale": np.float32(2.0),
    }

    def loss_fn(p: Any, images: jax.Array, texts: jax.Array) -> jax.Array:
        image, text = images, p["words"][texts].mean(1)
        if in_turns:
            for of_image, of_text in zip(p["vision"], p["text"], strict=True):
                image, text = _layer(of_image, image), _layer(of_text, text)
        else:
            for w in p["vision"]:
                image = _layer(w, image)
            for w in p["text"]:
                text = _layer(w, text)
        image, text = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (image, text))
        logits = p["scale"] * image @ text.T
        own = jnp.arange(len(images))
        return (_cross_entropy(logits, own) + _cross_entropy(logits.T, own)) / 2

    return params, loss_fn, (normal(30, ROWS, WIDTH, scale=1.0), tokens(31))


def vision_language(frozen: bool = False) -> tuple[Any, Any, Any]:
    """A vision tower whose patches are read by a language model before its words.

    Args:
        frozen: no gradient goes into the tower.
    """
    params = {
        "vision": [_matrix(0), _matrix(1)],
        "projector": _matrix(2),
        "words": _matrix(3, VOCAB),
        "layers": [_matrix(4), _matrix(5)],
        "head": _matrix(6, WIDTH, VOCAB),
    }

    def loss_fn(p: Any, patches: jax.Array, words: jax.Array, targets: jax.Array) -> jax.Array:
        image = patches
        for w in jax.lax.stop_gradient(p["vision"]) if frozen else p["vision"]:
            image = _layer(w, image)
        x = jnp.concatenate([image @ p["projector"], p["words"][words]], axis=1)
        for w in p["layers"]:
            x = _attend(w, x, x)
        return _cross_entropy(x[:, PATCHES:] @ p["head"], targets)

    return params, loss_fn, (normal(30, ROWS, PATCHES, WIDTH, scale=1.0), tokens(31), tokens(32))


def encoder_decoder() -> tuple[Any, Any, Any]:
    """Words of one embedding on both sides; each layer of the decoder reads the encoder's result."""
    params = {
        "words": _matrix(0, VOCAB),
        "encoder": [_matrix(1), _matrix(2)],
        "decoder": [{"self": _matrix(3 + k), "cross": _matrix(5 + k)} for k in range(2)],
        "head": _matrix(7, WIDTH, VOCAB),
    }

    def loss_fn(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        memory = p["words"][source]
        for w in p["encoder"]:
            memory = _attend(w, memory, memory)
        x = p["words"][target]
        for of in p["decoder"]:
            x = _attend(of["cross"], _attend(of["self"], x, x), memory)
        return _cross_entropy(x[:, :-1] @ p["head"], target[:, 1:])

    return params, loss_fn, (tokens(30, 5), tokens(31))


def further_tokens(heads: int = 2) -> tuple[Any, Any, Any]:
    """A language model with modules that each predict one token further, as DeepSeek-V3's.

    Each module joins the hidden values before it with the embedding of the next token.  They share
    the model's embedding, which the first stage reads too, and its head.
    """
    params = {
        "words": _matrix(0, VOCAB),
        "layers": [_matrix(1 + k) for k in range(3)],
        "norm": np.ones(WIDTH, np.float32),
        "head": _matrix(5, WIDTH, VOCAB),
        "further": [
            {"join": _matrix(6 + k, 2 * WIDTH), "layer": _matrix(9 + k), "norm": np.ones(WIDTH, np.float32)}
            for k in range(heads)
        ],
    }

    def normed(scale: jax.Array, x: jax.Array) -> jax.Array:
        return scale * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def loss_fn(p: Any, words: jax.Array) -> jax.Array:
        count = words.shape[1] - 1 - heads  # positions for which all the targets are there
        hidden = p["words"][words[:, :count]]
        for w in p["layers"]:
            hidden = _attend(w, hidden, hidden)
        loss = _cross_entropy(normed(p["norm"], hidden) @ p["head"], words[:, 1 : count + 1])
        for depth, of in enumerate(p["further"], 1):
            known = p["words"][words[:, depth : depth + count]]
            both = jnp.concatenate([normed(of["norm"], hidden), normed(of["norm"], known)], axis=-1)
            hidden = _attend(of["layer"], both @ of["join"], both @ of["join"])
            targets = words[:, depth + 1 : depth + 1 + count]
            loss += 0.3 / heads * _cross_entropy(normed(p["norm"], hidden) @ p["head"], targets)
        return loss

    return params, loss_fn, (tokens(30, WORDS + 2),)

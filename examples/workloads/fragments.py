"""Fragments of models: stages of a transformer, an MLP, a ViT, experts, and Adam."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def norm(x: Any, scale: Any, shift: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return (centred * inverse * scale + shift).astype(x.dtype)


def attention(heads: int, x: Any, w: Any, bias: Any) -> Any:
    width = x.shape[-1] // heads
    q, k, v = jnp.split(x @ w + bias, 3, -1)
    q, k, v = (a.reshape(*a.shape[:2], heads, width).transpose(0, 2, 1, 3) for a in (q, k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * np.asarray(1 / math.sqrt(width), x.dtype)
    rows = jnp.arange(x.shape[1])
    scores = jnp.where(rows[:, None] >= rows, scores, jnp.asarray(-1e9, x.dtype))
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v).transpose(0, 2, 1, 3).reshape(x.shape)


def mlp(x: Any, up: Any, b1: Any, down: Any, b2: Any) -> Any:
    return jax.nn.gelu(x @ up + b1) @ down + b2


def block(heads: int, x: Any, *p: Any) -> Any:
    x = x + attention(heads, norm(x, p[0], p[1]), p[2], p[3]) @ p[4] + p[5]
    return x + mlp(norm(x, p[6], p[7]), *p[8:12])


def head(x: Any, table: Any, labels: Any) -> Any:
    logits = (x @ table.T).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()


def experts(x: Any, router: Any, w: Any) -> Any:
    gates = jax.nn.softmax((x @ router).astype(jnp.float32))
    best, which = jax.lax.top_k(gates, 2)
    chosen = (jax.nn.one_hot(which, router.shape[1]) * best[..., None]).sum(-2).astype(x.dtype)
    return jnp.einsum("btef,bte->btf", jnp.tanh(jnp.einsum("btd,edf->btef", x, w)), chosen)


def patches(image: Any, w: Any, place: Any) -> Any:
    b = image.shape[0]
    tokens = image.reshape(b, 8, 4, 8, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, 64, 48)
    return tokens @ w + place


def adam(*arrays: Any) -> list[Any]:
    """Updates of several parameters, each given with its two moments and its gradient."""
    made: list[Any] = []
    for p, m, v, g in zip(arrays[::4], arrays[1::4], arrays[2::4], arrays[3::4]):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        made += [p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v]
    return made


def gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The value and the gradients of the first `count` arguments; the last one is the cotangent."""

    def both(*given: Any) -> Any:
        rest = given[count:-1]
        value, pull = jax.vjp(lambda *a: function(*a, *rest), *given[:count])
        return value, pull(given[-1].reshape(value.shape).astype(value.dtype))

    return both


def cases(size: dict[str, int], dtype: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """(name, function, arguments) of every fragment at a size and a dtype."""
    kind = {"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype]
    rng = np.random.default_rng(0)
    b, t, d, vocabulary = size["batch"], size["tokens"], size["width"], size["vocabulary"]

    def normal(*shape: int, scale: float = 0.05) -> Any:
        return np.asarray(rng.standard_normal(shape, np.float32) * scale, kind)

    x, labels = normal(b, t, d, scale=1.0), rng.integers(0, vocabulary, (b, t)).astype(np.int32)
    ones = np.ones(d, kind)
    weights = [normal(d, 3 * d), normal(3 * d), normal(d, d), normal(d)]
    inner = [normal(d, 4 * d), normal(4 * d), normal(4 * d, d), normal(d)]
    p = [ones, normal(d), *weights, ones, normal(d), *inner]
    table, image = normal(vocabulary, d), normal(b, 32, 32, 3, scale=1.0)
    moe, vit = [normal(d, 4), normal(4, d, d)], [image, normal(48, d), normal(64, d)]
    layer = functools.partial(block, size["heads"])
    loss = np.ones((), np.float32)
    moments = [np.abs(w) for w in (inner[0], weights[0], inner[1], ones) for _ in range(4)]
    return [
        ("block forward", layer, [x, *p]),
        ("block forward+backward", gradients(layer, 13), [x, *p, x]),
        ("mlp forward", mlp, [x, *inner]),
        ("mlp forward+backward", gradients(mlp, 5), [x, *inner, x]),
        ("embedding", lambda e, i: e[i], [table, labels]),
        ("head forward+backward", gradients(head, 2), [x, table, labels, loss]),
        ("patches forward+backward", gradients(patches, 3), [*vit, normal(b, 64, d)]),
        ("experts forward+backward", gradients(experts, 3), [x, *moe, x]),
        ("adam", adam, moments),
    ]

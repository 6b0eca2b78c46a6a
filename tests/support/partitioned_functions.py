"""Functions that are partitioned over the devices of a mesh, each with whole arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def floats(*dims):
    return np.random.default_rng(sum(dims)).standard_normal(dims).astype(np.float32)


def integers(below, *dims):
    """Some of them out of range."""
    return np.random.default_rng(sum(dims)).integers(-2, below + 2, dims).astype(np.int32)


def window(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")


def attention(q, k, v):
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), jnp.einsum("bhtk,bhsk->bhts", q, k), -1e9)
    return jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(scores), v)


def layers(ws, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, ws)


def picked(table, rows):
    return jnp.take_along_axis(table, rows[:, None], 1)


TABLE = floats(8, 4)

FUNCTIONS = {
    "add": (lambda a, b: a + b, (TABLE, TABLE)),
    "broadcast": (lambda a: jnp.broadcast_to(a[:, None, :], (8, 4, 4)), (TABLE,)),
    "stretch": (lambda a: jnp.broadcast_to(a, (8, 4)), (floats(8, 1),)),
    "matmul": (lambda a, b: a @ b, (TABLE, floats(4, 8))),
    "batch_matmul": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (floats(4, 8, 4), floats(4, 4, 8))),
    "sum": (lambda a: a.sum(0), (TABLE,)),
    "max": (lambda a: a.max(1), (TABLE,)),
    "prod": (lambda a: a.prod(1), (TABLE,)),
    "any": (lambda a: (a > 0).any(0), (TABLE,)),
    "argmax": (lambda a: jnp.argmax(a, 1), (TABLE,)),
    "sum_from": (lambda a: lax.reduce(a, np.float32(5), lax.add, (0,)), (TABLE,)),
    "transpose": (lambda a: a.T, (TABLE,)),
    "split_dim": (lambda a: a.reshape(4, 2, 4), (TABLE,)),
    "flatten": (lambda a: a.reshape(32), (TABLE,)),
    "other_dims": (lambda a: a.reshape(4, 8), (TABLE,)),
    "slice": (lambda a: a[2:6], (TABLE,)),
    "strided_slice": (lambda a: a[::2, :2], (TABLE,)),
    "concatenate": (lambda a, b: jnp.concatenate([a, b]), (TABLE, TABLE)),
    "pad": (lambda a: jnp.pad(a, ((2, 2), (0, 0))), (floats(4, 4),)),
    "reverse": (lambda a: a[::-1], (TABLE,)),
    "roll": (lambda a: jnp.roll(a, 3, 0), (TABLE,)),
    "iota": (lambda a: a + lax.broadcasted_iota(np.float32, (8, 4), 0), (TABLE,)),
    "triangle": (jnp.tril, (floats(8, 8),)),
    "constant": (lambda a: a + np.arange(32, dtype=np.float32).reshape(8, 4), (TABLE,)),
    "dynamic_slice": (lambda a, k: lax.dynamic_slice(a, (k, 0), (4, 4)), (TABLE, np.int32(3))),
    "one_row": (lambda a, k: lax.dynamic_slice(a, (k, 0), (1, 4)), (TABLE, np.int32(3))),
    "update_slice": (
        lambda a, b, k: lax.dynamic_update_slice(a, b, (k, 0)),
        (TABLE, floats(4, 4), np.int32(3)),
    ),
    "embedding": (lambda e, t: e[t], (TABLE, integers(8, 4, 2))),
    "embedding_gradient": (
        lambda e, t, g: jax.vjp(lambda e: e[t], e)[1](g)[0],
        (TABLE, integers(8, 4, 2), floats(4, 2, 4)),
    ),
    "take_along": (picked, (TABLE, integers(4, 8))),
    "take_along_gradient": (
        lambda a, t: jax.grad(lambda a: (picked(a, t) ** 2).sum())(a),
        (TABLE, integers(4, 8)),
    ),
    "gather_points": (lambda a, t, u: a[t, u], (TABLE, integers(8, 6), integers(4, 6))),
    "scatter_points": (lambda a, t, u: a.at[t, u].add(1.0), (TABLE, integers(8, 8), integers(4, 8))),
    "scatter_set": (lambda a, t: a.at[t].set(1.0), (TABLE, integers(8, 4))),
    "scatter_max": (lambda a, t, u: a.at[t].max(u), (TABLE, integers(8, 8), TABLE)),
    "scatter_multiply": (lambda a, t, u: a.at[t].mul(u), (TABLE, integers(8, 8), TABLE)),
    "sort": (lambda a: jnp.sort(a, 1), (TABLE,)),
    "top_k": (lambda a: lax.top_k(a, 2), (TABLE,)),
    "cumsum": (lambda a: jnp.cumsum(a, 0), (TABLE,)),
    "softmax": (jax.nn.softmax, (TABLE,)),
    "scan": (layers, (floats(4, 4, 4), TABLE)),
    "cond": (
        lambda p, x: lax.cond(p > 0, lambda x: x.sum(0), lambda x: x[0] * 2, x),
        (np.float32(1), TABLE),
    ),
    "threefry": (lambda k: jax.random.normal(k, (8, 4)), (np.array([1, 2], np.uint32),)),
    "random_bits": (lambda k: lax.rng_bit_generator(k, (8, 4))[1], (np.arange(4, dtype=np.uint32),)),
    "max_pool": (window, (floats(4, 8, 8),)),
    "max_pool_gradient": (jax.grad(lambda x: window(x).sum()), (floats(4, 8, 8),)),
    "uneven": (lambda a: jnp.tanh(a.reshape(3, 8)).sum(0), (floats(24),)),
    "erf": (lax.erf, (TABLE,)),
    "clamp": (lambda a: jnp.clip(a, -1, 1), (TABLE,)),
    "one_hot": (lambda t: jax.nn.one_hot(t, 8), (integers(8, 8),)),
    "narrow_bits": (lambda a: lax.bitcast_convert_type(a, np.uint16), (TABLE,)),
    "row_by_row": (
        lambda a, k: jax.vmap(lambda r, j: lax.dynamic_slice(r, (j,), (2,)))(a, k),
        (TABLE, integers(4, 8)),
    ),
    "attention": (attention, (floats(4, 4, 4, 4),) * 3),
}

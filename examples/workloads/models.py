"""Small models, each a loss with named stages, that stand for what users pipeline.

A builder takes the number of stages and gives `(params, loss_fn, batch)`: the loss takes
`(params, *microbatch)`, the batch holds 8 rows, the names are `stage0`, `stage1`, ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpmd
from examples.workloads import flows

ROWS = 8
D = 16
VOCAB = 11
SEQ = 6


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and facts known about it.

    Attributes:
        name: how tests call it.
        build: `build(num_stages) -> (params, loss_fn, batch)`.
        tolerance: the largest difference to `jax.jit` after 20 steps.
        flow: what has to travel, by the number of stages.
        programs: the most distinct programs that a stage needs: forward, backward, optimizer, and what
            precedes the first microbatch.
    """

    name: str
    build: Callable[[int], tuple[Any, Callable[..., Any], tuple[Any, ...]]]
    tolerance: float = 1e-5
    flow: Callable[[int], flows.Flow] = flows.along_the_chain
    programs: int = 4


def normal(seed: int, *shape: int, scale: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale


def dense_params(seed: int, n: int = D, m: int = D) -> dict[str, np.ndarray]:
    return {"w": normal(seed, n, m), "b": normal(seed + 1000, m, scale=0.1)}


def dense(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"])


def named(fn: Callable[..., Any], s: int) -> Callable[..., Any]:
    return mpmd.named_computation(fn, name=f"stage{s}")


def square(h: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((h - y) ** 2)


def regression_batch() -> tuple[np.ndarray, np.ndarray]:
    return normal(7, ROWS, D, scale=1.0), normal(8, ROWS, D, scale=1.0)


def token_batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.integers(0, VOCAB, (ROWS, SEQ)), rng.integers(0, VOCAB, (ROWS, SEQ))


def chain(
    stages: int, layer: Callable[..., Any], around: Callable[[Any], Any] = lambda fn: fn
) -> Callable[..., Any]:
    """The loss of `layer(params["s0"], x)`, and so on: one layer per stage; `around` wraps each stage."""

    def last(p, x, y):
        return square(layer(p, x), y)

    def loss(params, x, y):
        for s in range(stages - 1):
            x = around(named(layer, s))(params[f"s{s}"], x)
        return around(named(last, stages - 1))(params[f"s{stages - 1}"], x, y)

    return loss


def mlp(stages: int) -> Any:
    """A chain of dense layers, one per stage."""
    return {f"s{s}": dense_params(s) for s in range(stages)}, chain(stages, dense), regression_batch()


def uneven(stages: int) -> Any:
    """Stage s holds s + 1 layers."""
    params = {f"s{s}": [dense_params(10 * s + i) for i in range(s + 1)] for s in range(stages)}

    def run(layers, x):
        for p in layers:
            x = dense(p, x)
        return x

    return params, chain(stages, run), regression_batch()


def skip(stages: int) -> Any:
    """The output of the first stage is used again by the last."""
    params = {f"s{s}": dense_params(s) for s in range(stages)}

    def last(p, x, first, y):
        return square(dense(p, x) + first, y)

    def loss(params, x, y):
        x = first = named(dense, 0)(params["s0"], x)
        for s in range(1, stages - 1):
            x = named(dense, s)(params[f"s{s}"], x)
        return named(last, stages - 1)(params[f"s{stages - 1}"], x, first, y)

    return params, loss, regression_batch()


def batch_everywhere(stages: int) -> Any:
    """Every stage reads the batch."""
    params = {f"s{s}": dense_params(s) for s in range(stages)}

    def layer(p, x, batch):
        return dense(p, x) + batch

    def last(p, x, batch, y):
        return square(layer(p, x, batch), y)

    def loss(params, batch, y):
        x = batch
        for s in range(stages - 1):
            x = named(layer, s)(params[f"s{s}"], x, batch)
        return named(last, stages - 1)(params[f"s{stages - 1}"], x, batch, y)

    return params, loss, regression_batch()


def shapes_change(stages: int) -> Any:
    """Every boundary has another width."""
    widths = [D, *(4 * (s % 3 + 1) for s in range(stages - 1)), D]
    params = {f"s{s}": dense_params(s, widths[s], widths[s + 1]) for s in range(stages)}
    return params, chain(stages, dense), regression_batch()


def dropout(stages: int) -> Any:
    """Dropout with explicit keys, which travel with the batch."""
    params = {f"s{s}": dense_params(s) for s in range(stages)}

    def layer(p, x, key):
        return dense(p, x) * jax.random.bernoulli(key, 0.8, x.shape) / 0.8

    def last(p, x, y, key):
        return square(layer(p, x, key), y)

    def loss(params, x, y, keys):
        key = jax.random.wrap_key_data(keys[0])
        for s in range(stages - 1):
            x = named(layer, s)(params[f"s{s}"], x, jax.random.fold_in(key, s))
        return named(last, stages - 1)(params[f"s{stages - 1}"], x, y, jax.random.fold_in(key, stages))

    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), ROWS)))
    return params, loss, (*regression_batch(), keys)


def checkpointed(stages: int) -> Any:
    """`jax.checkpoint` around every stage."""
    params, _, batch = mlp(stages)
    return params, chain(stages, dense, around=jax.checkpoint), batch


def checkpointed_whole(stages: int) -> Any:
    """`jax.checkpoint` around the whole loss: every stage runs twice, the second time one after the other."""
    params, loss, batch = mlp(stages)
    return params, jax.checkpoint(loss), batch


def _norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def _attention(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = jnp.split(_norm(x) @ p["qkv"], 3, axis=-1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(D)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    return x + jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v @ p["out"]


def _block(p: Any, x: jax.Array) -> jax.Array:
    x = _attention(p, x)
    return x + jax.nn.gelu(_norm(x) @ p["up"]) @ p["down"]


def _block_params(seed: int) -> dict[str, np.ndarray]:
    return {
        "qkv": normal(seed, D, 3 * D),
        "out": normal(seed + 1, D, D),
        "up": normal(seed + 2, D, 2 * D),
        "down": normal(seed + 3, 2 * D, D),
    }


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()


def _transformer(stages: int, tied: bool) -> Any:
    params: dict[str, Any] = {f"s{s}": _block_params(10 * s) for s in range(stages)}
    params["embed"] = normal(99, VOCAB, D)
    if not tied:
        params["head"] = normal(98, VOCAB, D)

    def first(embed, p, tokens):
        return _block(p, embed[tokens])

    def last(head, p, x, labels):
        return _cross_entropy(_norm(_block(p, x)) @ head.T, labels)

    def loss(params, tokens, labels):
        x = named(first, 0)(params["embed"], params["s0"], tokens)
        for s in range(1, stages - 1):
            x = named(_block, s)(params[f"s{s}"], x)
        head = params["embed" if tied else "head"]
        return named(last, stages - 1)(head, params[f"s{stages - 1}"], x, labels)

    return params, loss, token_batch()


def transformer(stages: int) -> Any:
    """Embedding, attention blocks, output projection."""
    return _transformer(stages, tied=False)


def tied(stages: int) -> Any:
    """The embedding of the first stage is the output projection of the last."""
    return _transformer(stages, tied=True)


def shared_by_all(stages: int) -> Any:
    """One weight used by every stage."""
    params = {"shared": normal(1, D, D), **{f"s{s}": dense_params(s) for s in range(stages)}}

    def layer(shared, p, x):
        return dense(p, x @ shared)

    def last(shared, p, x, y):
        return square(layer(shared, p, x), y)

    def loss(params, x, y):
        for s in range(stages - 1):
            x = named(layer, s)(params["shared"], params[f"s{s}"], x)
        return named(last, stages - 1)(params["shared"], params[f"s{stages - 1}"], x, y)

    return params, loss, regression_batch()


def stacked(stages: int) -> Any:
    """One stacked parameter; every stage slices its own part."""
    params = {"w": normal(1, stages, D, D), "b": normal(2, stages, D, scale=0.1)}
    of_parts = chain(stages, dense)

    def loss(params, x, y):
        return of_parts({f"s{s}": jax.tree.map(lambda p, s=s: p[s], params) for s in range(stages)}, x, y)

    return params, loss, regression_batch()


def frozen_first(stages: int) -> Any:
    """No gradient flows into the first stage."""
    params, _, batch = mlp(stages)

    def last(p, x, y):
        return square(dense(p, x), y)

    def loss(params, x, y):
        x = jax.lax.stop_gradient(named(dense, 0)(params["s0"], x))
        for s in range(1, stages - 1):
            x = named(dense, s)(params[f"s{s}"], x)
        return named(last, stages - 1)(params[f"s{stages - 1}"], x, y)

    return params, loss, batch


def unused_parameter(stages: int) -> Any:
    """A parameter that the loss does not use."""
    params, loss, batch = mlp(stages)
    return {**params, "unused": normal(5, 3)}, loss, batch


def mixture(stages: int) -> Any:
    """A layer of four experts, softly routed to the best two."""
    params = {f"s{s}": {"router": normal(s, D, 4), "w": normal(s + 50, 4, D, D)} for s in range(stages)}

    def layer(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        best, which = jax.lax.top_k(gates, 2)
        chosen = jax.nn.one_hot(which, 4) * best[..., None]
        return jnp.tanh(jnp.einsum("nke,edf,nd->nf", chosen, p["w"], x))

    return params, chain(stages, layer), regression_batch()


def half_precision(stages: int) -> Any:
    """Weights and activations in bfloat16."""
    params, loss, batch = mlp(stages)
    half = jax.tree.map(lambda w: np.asarray(w, jnp.bfloat16), params)

    def in_half(params, x, y):
        return loss(params, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)).astype(jnp.float32)

    return half, in_half, batch


def custom_gradient(stages: int) -> Any:
    """Stages with a `custom_vjp` and a `cond` inside."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    params, _, batch = mlp(stages)

    def layer(p, x):
        x = jax.lax.cond(jnp.mean(x) > 0, lambda x: 2 * x, lambda x: x, x)
        return clipped(dense(p, x))

    return params, chain(stages, layer), batch


def scanned_layers(stages: int) -> Any:
    """Each stage scans over its own stack of layers."""
    params = {f"s{s}": {"w": normal(s, 3, D, D), "b": normal(s + 9, 3, D, scale=0.1)} for s in range(stages)}

    def run(stack, x):
        return jax.lax.scan(lambda x, p: (dense(p, x), None), x, stack)[0]

    return params, chain(stages, run), regression_batch()


MODELS = {
    m.name: m
    for m in (
        Model("mlp", mlp),
        Model("uneven", uneven),
        Model("skip", skip, flow=flows.with_skip),
        Model("batch_everywhere", batch_everywhere),
        Model("shapes_change", shapes_change),
        Model("dropout", dropout),
        Model("checkpointed", checkpointed),
        Model("checkpointed_whole", checkpointed_whole, flow=flows.twice, programs=5),
        Model("transformer", transformer),
        Model("tied", tied, flow=lambda s: flows.shared(s, [s - 1])),
        Model("shared_by_all", shared_by_all, flow=lambda s: flows.shared(s, range(1, s))),
        Model("stacked", stacked, flow=lambda s: flows.shared(s, range(1, s), values=2)),
        Model("frozen_first", frozen_first, flow=flows.without_gradients_of_the_first),
        Model("unused_parameter", unused_parameter),
        Model("mixture", mixture),
        Model("half_precision", half_precision, tolerance=3e-2),
        Model("custom_gradient", custom_gradient),
        Model("scanned_layers", scanned_layers),
    )
}

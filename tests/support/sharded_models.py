"""Models whose layers may be split over the devices of a mesh, with the shardings that say how.

Axis `data` splits batches.  Axis `model` splits the layers, as Megatron does: heads of attention, the hidden
width of dense layers, experts of a mixture, rows of an embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mpmd
from examples.workloads.models import (
    ROWS,
    SEQ,
    D,
    chain,
    named,
    normal,
    regression_batch,
)

HEADS, HEAD, EXPERTS, WORDS = 4, 4, 4, 12
STAGES = 2


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model of two stages.

    Attributes:
        params: host arrays.
        loss: `loss(params, *microbatch)`.
        batch: host arrays.
        specs: how the parameters are split over the axis `model`, a pytree like `params`.
    """

    params: Any
    loss: Callable[..., Any]
    batch: tuple[Any, ...]
    specs: Any


def _mlp_layer(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def mlp() -> ShardedModel:
    """Two layers per stage: the first is split by columns, the second by rows."""
    params = {
        f"s{s}": {
            "up": normal(s, D, 2 * D),
            "bias": normal(s + 9, 2 * D, scale=0.1),
            "down": normal(s + 20, 2 * D, D),
        }
        for s in range(STAGES)
    }
    layer = {"up": P(None, "model"), "bias": P("model"), "down": P("model", None)}
    specs = {f"s{s}": layer for s in range(STAGES)}
    return ShardedModel(params, chain(STAGES, _mlp_layer), regression_batch(), specs)


def _norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def _block(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhk->bhtk", _norm(x), p[name]) for name in ("q", "k", "v"))
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / np.sqrt(HEAD)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    mixed = jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
    x = x + jnp.einsum("bhtk,hkd->btd", mixed, p["out"])
    return x + jax.nn.gelu(_norm(x) @ p["up"]) @ p["down"]


def transformer() -> ShardedModel:
    """Embedding, a block of attention and dense layers per stage, output projection."""
    shapes = {
        "q": (D, HEADS, HEAD),
        "k": (D, HEADS, HEAD),
        "v": (D, HEADS, HEAD),
        "out": (HEADS, HEAD, D),
        "up": (D, 2 * D),
        "down": (2 * D, D),
    }
    params: dict[str, Any] = {
        f"s{s}": {name: normal(10 * s + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
        for s in range(STAGES)
    }
    heads = P(None, "model", None)
    block = {
        "q": heads,
        "k": heads,
        "v": heads,
        "out": P("model", None, None),
        "up": P(None, "model"),
        "down": P("model", None),
    }
    specs: dict[str, Any] = {f"s{s}": block for s in range(STAGES)}
    params |= {"embed": normal(99, WORDS, D), "head": normal(98, D, WORDS)}
    specs |= {"embed": P("model", None), "head": P(None, "model")}

    def first(embed: Any, p: Any, tokens: Any) -> jax.Array:
        return _block(p, embed[tokens])

    def last(head: Any, p: Any, x: jax.Array, labels: Any) -> jax.Array:
        logits = jax.nn.log_softmax(_norm(_block(p, x)) @ head)
        return -jnp.take_along_axis(logits, labels[..., None], -1).mean()

    def loss(params: Any, tokens: Any, labels: Any) -> jax.Array:
        x = named(first, 0)(params["embed"], params["s0"], tokens)
        return named(last, 1)(params["head"], params["s1"], x, labels)

    rng = np.random.default_rng(3)
    batch = rng.integers(0, WORDS, (ROWS, SEQ)), rng.integers(0, WORDS, (ROWS, SEQ))
    return ShardedModel(params, loss, batch, specs)


def _experts(p: Any, x: jax.Array) -> jax.Array:
    best, which = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    gates = (jax.nn.one_hot(which, EXPERTS) * best[..., None]).sum(1)
    hidden = jnp.tanh(jnp.einsum("nd,edf->enf", x, p["up"]))
    return jnp.einsum("ne,enf,efd->nd", gates, hidden, p["down"])


def mixture() -> ShardedModel:
    """A layer of experts per stage, softly routed to the best two; every device has some of the experts."""
    params = {
        f"s{s}": {
            "router": normal(s, D, EXPERTS),
            "up": normal(s + 50, EXPERTS, D, D),
            "down": normal(s + 60, EXPERTS, D, D),
        }
        for s in range(STAGES)
    }
    layer = {"router": P(), "up": P("model", None, None), "down": P("model", None, None)}
    specs = {f"s{s}": layer for s in range(STAGES)}
    return ShardedModel(params, chain(STAGES, _experts), regression_batch(), specs)


def scanned() -> ShardedModel:
    """A scan over three layers per stage: sums over devices are inside of a loop."""
    layers = 3
    params = {
        f"s{s}": {
            "up": normal(s, layers, D, 2 * D),
            "bias": normal(s + 9, layers, 2 * D, scale=0.1),
            "down": normal(s + 20, layers, 2 * D, D),
        }
        for s in range(STAGES)
    }

    def stage(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (x + 0.2 * _mlp_layer(layer, x), None), x, p)[0]

    layer = {"up": P(None, None, "model"), "bias": P(None, "model"), "down": P(None, "model", None)}
    specs = {f"s{s}": layer for s in range(STAGES)}
    return ShardedModel(params, chain(STAGES, stage), regression_batch(), specs)


SHARDED_MODELS = {"mlp": mlp, "transformer": transformer, "mixture": mixture, "scanned": scanned}

MESHES = {
    "one device": {"data": 1, "model": 1},
    "two for data": {"data": 2},
    "two for tensors": {"model": 2},
    "four for data": {"data": 4},
    "four for tensors": {"model": 4},
    "two and two": {"data": 2, "model": 2},
}
EIGHT = {"two and four": {"data": 2, "model": 4}, "four and two": {"data": 4, "model": 2}}


def shardings(model, axes):
    """For `step(state, *batch)`: parameters by `model` and batches by `data`, if there are such axes."""
    state = (model.specs, model.specs) if "model" in axes else None
    return {"in_shardings": (state, *(P("data") if "data" in axes else None for _ in model.batch))}


UNLIKE = {
    "one and two for data": ({"data": 1}, {"data": 2}),
    "two and four for data": ({"data": 2}, {"data": 4}),
    "two and four for tensors": ({"model": 2}, {"model": 4}),
    "one and four, both": ({"data": 1, "model": 1}, {"data": 2, "model": 2}),
    "data here, tensors there": ({"data": 4}, {"model": 2}),
    "four here, one there": ({"data": 2, "model": 2}, {"data": 1}),
}


def pipelined_on(step, meshes, options):
    topology = mpmd.make_topology({f"m{s}": axes for s, axes in enumerate(meshes)})
    config = mpmd.make_config(topology, {f"stage{s}": f"m{s}" for s in range(len(meshes))}, **options)
    return mpmd.jit(step, config, donate_argnums=0)

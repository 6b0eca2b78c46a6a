"""Models for `plan_quality.py`: each with parameters, a loss, a batch, and stages by hand.

They are small, but large enough that a stage's work for a microbatch takes about a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpmd

WIDTH, WORDS, LENGTH, BATCH, LAYERS = 128, 512, 64, 32, 6

Model = tuple[Any, Callable[..., Any], tuple[Any, ...], Any]
"""Parameters, loss, batch, and `stages=` by hand."""


def _normal(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32)


def _tokens() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return tuple(random.integers(0, WORDS, (BATCH, LENGTH)).astype(np.int32) for _ in range(2))  # type: ignore[return-value]


def _values() -> tuple[np.ndarray, np.ndarray]:
    return _normal(1, BATCH * LENGTH, WIDTH), _normal(2, BATCH * LENGTH, WIDTH)


def _entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def _square(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x - y) ** 2)


def _layer(seed: int, *layers: int) -> dict[str, np.ndarray]:
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {name: _normal(seed + k, *layers, *shape) for k, (name, shape) in enumerate(shapes.items())}


def _block(p: Any, x: jax.Array) -> jax.Array:
    h = x - x.mean(-1, keepdims=True)
    scores = jnp.einsum("btd,bsd->bts", h @ p["q"], h @ p["k"]) / WIDTH**0.5
    x = x + jax.nn.softmax(scores) @ (h @ p["v"])
    h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(h @ p["up"]) @ p["down"]


def _transformer(around: Any = lambda f: f, *, tied: bool = False) -> Model:
    def loss(params: Any, ids: Any, targets: Any) -> jax.Array:
        x = params["embed"][ids]
        for p in params["layers"]:
            x = around(_block)(p, x)
        return _entropy(x @ (params["embed"].T if tied else params["head"]), targets)

    params = {"embed": _normal(3, WORDS, WIDTH), "layers": [_layer(10 * i) for i in range(LAYERS)]}
    if not tied:
        params["head"] = _normal(4, WIDTH, WORDS)
    return params, loss, _tokens(), mpmd.by_parameters(r"layers/(\d+)")


def separate() -> Model:
    """A transformer with separate layers."""
    return _transformer()


def tied() -> Model:
    """The embedding is the head."""
    return _transformer(tied=True)


def rematerialised() -> Model:
    """Each layer is under a checkpoint."""
    return _transformer(jax.checkpoint)


def scanned() -> Model:
    """A scan over stacked layers."""

    def loss(params: Any, ids: Any, targets: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (_block(p, x), None), params["embed"][ids], params["layers"])
        return _entropy(x @ params["head"], targets)

    params = {
        "embed": _normal(3, WORDS, WIDTH),
        "layers": _layer(0, LAYERS),
        "head": _normal(4, WIDTH, WORDS),
    }
    return params, loss, _tokens(), mpmd.split("layers")


def skips() -> Model:
    """Values of the first half are read in the second, as in a U-Net."""

    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        saved = []
        for w in params["layers"][:LAYERS]:
            x = jnp.tanh(x @ w)
            saved.append(x)
        for w in params["layers"][LAYERS:]:
            x = jnp.tanh((x + saved.pop()) @ w)
        return _square(x, y)

    params = {"layers": [_normal(i, WIDTH, WIDTH) for i in range(2 * LAYERS)]}
    return params, loss, _values(), mpmd.by_parameters(r"layers/(\d+)")


def encoder_decoder() -> Model:
    """The decoder reads the last value of the encoder in every layer."""

    def loss(params: Any, source: Any, target: Any) -> jax.Array:
        x = params["embed"][source]
        for p in params["encoder"]:
            x = _block(p, x)
        y = params["embed"][target]
        for p, q in zip(params["decoder"], params["across"], strict=True):
            y = _block(p, y)
            y = y + jax.nn.softmax(jnp.einsum("btd,bsd->bts", y @ q, x) / WIDTH**0.5) @ x
        return _entropy(y @ params["head"], target)

    half = LAYERS // 2
    params = {
        "embed": _normal(3, WORDS, WIDTH),
        "encoder": [_layer(10 * i) for i in range(half)],
        "decoder": [_layer(100 + 10 * i) for i in range(half)],
        "across": [_normal(200 + i, WIDTH, WIDTH) for i in range(half)],
        "head": _normal(4, WIDTH, WORDS),
    }
    return params, loss, _tokens(), mpmd.by_parameters(r"encoder/(\d+)", r"decoder/(\d+)")


class _LinenNet(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = flax.linen.Dense(WIDTH, name="inward")(x)
        for i in range(LAYERS):
            h = flax.linen.Dense(2 * WIDTH, name=f"layers_{i}_up")(
                flax.linen.LayerNorm(name=f"layers_{i}_norm")(x)
            )
            x = x + flax.linen.Dense(WIDTH, name=f"layers_{i}_down")(flax.linen.gelu(h))
        return flax.linen.Dense(WIDTH, name="outward")(x)


def linen() -> Model:
    """A network of flax.linen."""
    model, batch = _LinenNet(), _values()
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), batch[0][:1]))
    return params, lambda p, x, y: _square(model.apply(p, x), y), batch, mpmd.by_parameters(r"layers_(\d+)")


class _NnxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class _NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([_NnxLayer(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def of_nnx() -> Model:
    """A network of flax.nnx, whose layers leave no names in the program."""
    definition, params = nnx.split(_NnxNet(nnx.Rngs(0)), nnx.Param)
    params = jax.tree.map(np.asarray, params)

    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        return _square(nnx.merge(definition, params)(x), y)

    return params, loss, _values(), mpmd.by_parameters(r"layers/(\d+)")


def haiku() -> Model:
    """A network of haiku."""

    def forward(x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            h = jax.nn.gelu(hk.Linear(2 * WIDTH, name=f"layer_{i}_up")(x))
            x = x + hk.Linear(WIDTH, name=f"layer_{i}_down")(h)
        return x

    net, batch = hk.transform(forward), _values()
    params = jax.tree.map(np.asarray, net.init(jax.random.key(0), batch[0]))
    return (
        params,
        lambda p, x, y: _square(net.apply(p, None, x), y),
        batch,
        mpmd.by_parameters(r"layer_(\d+)"),
    )


def large_head() -> Model:
    """Few layers under a head that is most of the work: equal numbers of layers are not equal work."""

    def loss(params: Any, ids: Any, targets: Any) -> jax.Array:
        x = params["embed"][ids]
        for p in params["layers"]:
            x = _block(p, x)
        return _entropy(x @ params["head"], targets)

    params = {
        "embed": _normal(3, 8 * WORDS, WIDTH),
        "layers": [_layer(10 * i) for i in range(4)],
        "head": _normal(4, WIDTH, 8 * WORDS),
    }
    return params, loss, _tokens(), mpmd.by_parameters(r"layers/(\d+)", lengths=[3, 1])


MODELS = {
    model.__name__: model
    for model in (
        separate, tied, rematerialised, scanned, skips, encoder_decoder, linen, of_nnx, haiku, large_head
    )
}  # fmt: skip

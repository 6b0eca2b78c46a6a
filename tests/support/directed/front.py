"""Layered models, directed at what gives them stages: by cost, by parameters, by split, by names.

Layers differ in what they are made of: scalars among the parameters, weights that layers share, scans of no,
one or several rows, loops of unknown length, conditionals, functions with derivatives of their own,
rematerialisation, auxiliary results, parameters that are None or have no elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpmd

ROWS, MICROBATCHES = 4, 2
WIDTHS = (1, 2, 7, 8, 9, 16, 33)


@jax.custom_vjp
def clipped(x):
    """The identity with a gradient of its own."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))


@jax.custom_jvp
def softened(x):
    """The logarithm of 1 + exp x."""
    return jnp.logaddexp(x, 0.0)


softened.defjvps(lambda t, _, x: t * jax.nn.sigmoid(x))


def dense(p, x):
    return jnp.tanh(x @ p["w"])


def residual(p, x):
    return x + jnp.sin(x @ p["w"]) * p["scale"]


def normed(p, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-2) * jnp.exp(p["scale"])


def looping(p, x):
    """A loop whose number of iterations is unknown while tracing."""
    count, _ = jax.lax.while_loop(
        lambda c: c[1] < 3, lambda c: (c[0] + 1, c[1] * 2 + 1), (0.0, x.size * 0.01)
    )
    return dense(p, x) * (1 + 0.1 * count)


def chosen(p, x):
    return jax.lax.cond(x[0, 0] > 0, lambda p, x: x @ p["w"], lambda p, x: x * p["scale"], p, x)


def several(p, x):
    """A scan of the drawn number of rows within the layer."""
    x, outs = jax.lax.scan(lambda x, w: (jnp.tanh(x * w), x.sum()), x, p["rows"])
    return x @ p["w"] + outs.sum()


def own_backward(p, x):
    return clipped(x @ p["w"])


def own_forward(p, x):
    return softened(x @ p["w"]) * p["scale"]


def with_none(p, x):
    return x @ p["w"] if p["nothing"] is None else x


def with_empty(p, x):
    return jnp.concatenate([x, x[:, :0] @ p["empty"]], 1)[:, : x.shape[1]] @ p["w"] + p["empty"].sum()


def cut(p, x):
    """A value whose gradient is cut off."""
    return jnp.tanh(x @ p["w"]) * jax.lax.stop_gradient(1 + x.mean()) / 2


LAYERS = (
    dense, residual, normed, looping, chosen, several, own_backward, own_forward, with_none, with_empty, cut
)  # fmt: skip


@dataclasses.dataclass
class Drawn:
    """A model and how it gets stages.

    Attributes:
        text: what was drawn.
        params: its parameters, and the layers' where the loss has names.
        batch: the other arguments of the loss.
        loss: `loss(params, x, y)`, with or without an auxiliary result.
        has_aux: whether it has one.
        meshes: how many.
        stages: what is said to `mpmd.make_config`; None for names.
        assignment: of the names.
    """

    text: str
    params: Any
    batch: tuple[Any, ...]
    loss: Callable[..., Any]
    has_aux: bool
    meshes: int
    stages: Any
    assignment: dict[str, str]

    def step(self) -> Callable[..., Any]:
        """The mean loss and gradients."""
        return mpmd.accumulate_gradients(self.loss, MICROBATCHES, has_aux=self.has_aux)

    def jitted(self) -> Any:
        """The step on its meshes."""
        topology = mpmd.make_topology({f"m{s}": 1 for s in range(self.meshes)})
        given = {"stages": self.stages} if self.stages is not None else {}
        return mpmd.jit(self.step(), mpmd.make_config(topology, self.assignment, backend="xla", **given))


def layer_params(rng: np.random.Generator, width: int) -> dict[str, Any]:
    """Parameters that every layer takes its own from."""

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(max(width, 1))).astype(np.float32)

    return {"w": normal(width, width), "scale": normal(), "rows": normal(int(rng.integers(0, 4)), width)}


def draw(seed: int) -> Drawn:
    """A model, of all kinds in turn; every choice is `numpy`'s from the seed."""
    rng = np.random.default_rng(seed)
    kind = ("auto", "parameters", "split", "names")[int(rng.choice(4, p=(0.4, 0.3, 0.15, 0.15)))]
    width, count = int(rng.choice(WIDTHS)), int(rng.integers(2, 7))
    functions = [LAYERS[int(k)] for k in rng.choice(len(LAYERS), count)]
    if kind == "split":
        functions = [functions[0]] * count
    layers = [layer_params(rng, width) for _ in range(count)]
    for p in layers if kind != "split" else ():
        p["nothing"], p["empty"] = None, np.zeros((0, width), np.float32)
    if kind == "split":
        functions = [f if f not in (with_none, with_empty, several) else dense for f in functions]
        layers = [{name: p[name] for name in ("w", "scale")} for p in layers]
    shared = kind != "split" and rng.random() < 0.3
    if shared:
        layers[-1] = {**layers[-1], "w": None}
    remat, has_aux = rng.random() < 0.3, bool(rng.random() < 0.3)
    meshes = int(rng.integers(1, min(count, 3) + 1))
    params = {
        "layers": jax.tree.map(lambda *p: np.stack(p), *layers) if kind == "split" else layers,
        "temperature": np.float32(rng.standard_normal() * 0.3),
        "unused": np.ones(3, np.float32),
    }

    def applied(number: int) -> Callable[..., Any]:
        f = jax.checkpoint(functions[number]) if remat else functions[number]
        return mpmd.named_computation(f, name=f"layer{number}") if kind == "names" else f

    def loss(params, x, y):
        if kind == "split":
            x, _ = jax.lax.scan(lambda x, p: (applied(0)(p, x), None), x, params["layers"])
        else:
            for number, p in enumerate(params["layers"]):
                own = {**p, "w": params["layers"][0]["w"]} if p["w"] is None else p
                x = applied(number)(own, x)
        value = jnp.mean((x * jnp.exp(params["temperature"]) - y) ** 2)
        return (value, {"largest": jnp.abs(x).max(), "nothing": None}) if has_aux else value

    stages = {
        "auto": "auto",
        "parameters": mpmd.by_parameters(r"layers/(\d+)"),
        "split": mpmd.split("layers"),
    }
    x, y = (rng.standard_normal((ROWS, width)).astype(np.float32) for _ in range(2))
    names = {f"layer{k}": f"m{k * meshes // count}" for k in range(count)} if kind == "names" else {}
    text = (
        f"seed {seed}: {kind}, {meshes} meshes, width {width}, {[f.__name__ for f in functions]}"
        f"{', shared' * shared}{', remat' * remat}{', aux' * has_aux}"
    )
    return Drawn(text, params, (x, y), loss, has_aux, meshes, stages.get(kind), names)

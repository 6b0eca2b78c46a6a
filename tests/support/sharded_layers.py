"""Two stages of two layers each, and the ways in which tests shard them over meshes of several devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples.workloads.models import D, chain, normal, regression_batch

STAGES = 2

HIDDEN = {"up": P(None, "model"), "bias": P("model"), "down": P("model", None)}


def two_layers(constraint=None):
    """Stages of two layers; `constraint` is a sharding of what stands between them."""
    params = {
        f"s{s}": {
            "up": normal(s, D, 2 * D),
            "bias": normal(s + 9, 2 * D, scale=0.1),
            "down": normal(s + 20, 2 * D, D),
        }
        for s in range(STAGES)
    }

    def layer(p, x):
        hidden = x @ p["up"] + p["bias"]
        if constraint is not None:
            hidden = jax.lax.with_sharding_constraint(hidden, constraint)
        return jnp.tanh(hidden) @ p["down"]

    return params, chain(STAGES, layer), regression_batch()


def of_state(specs):
    """The same shardings for parameters and velocities."""
    return ({f"s{s}": specs for s in range(STAGES)},) * 2


ROWS = {"up": P("data"), "bias": None, "down": None}

DATA = {"in_shardings": (None, P("data"), P("data"))}

MODEL = {"in_shardings": (of_state(HIDDEN), None, None)}

BOTH = {"in_shardings": (of_state(HIDDEN), P("data"), P("data"))}

CASES = {
    "one device": ({"data": 1}, {}, None),
    "one device, two axes": ({"data": 1, "model": 1}, BOTH, P("data", "model")),
    "two for data": ({"data": 2}, DATA, None),
    "two for data, constraint": ({"data": 2}, {}, P("data")),
    "two for tensors": ({"model": 2}, MODEL, None),
    "two for tensors, constraint": ({"model": 2}, {}, P(None, "model")),
    "two and two": ({"data": 2, "model": 2}, BOTH, None),
    "two and two, constraint": ({"data": 2, "model": 2}, DATA, P("data", "model")),
    "four for data": ({"data": 4}, DATA, None),
    "results sharded": ({"data": 2}, {**DATA, "out_shardings": (of_state({**HIDDEN, **ROWS}), None)}, None),
}

"""Stages with a `jax.shard_map`, its collectives and what encloses it, compute what `jax.jit` computes."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpmd
from tests.support.comparing import relative_difference
from tests.support.manual_regions import AXES, LAYERS

pytestmark = pytest.mark.usefixtures("plain_xla")

SPLITS = {
    "whole": (None, None),
    "fsdp": ({"w": P("d"), "e": P("e")}, P(("d", "e"))),
    "both": ({"w": P(None, ("e", "d")), "e": P("e", "d")}, P("d")),
}


def values(*dims, seed=0):
    return (0.4 * np.random.default_rng(seed).standard_normal(dims)).astype(np.float32)


PARAMS = [{"w": values(8, 8, seed=i), "e": values(2, 8, 8, seed=i + 5)} for i in range(2)]
X = values(16, 8)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "native"])
@pytest.mark.parametrize(("split", "schedule"), [("whole", "1f1b"), ("fsdp", "zb_h1"), ("both", "1f1b")])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_stage_with_a_shard_map_equals_jit(layer, split, backend, schedule):
    def loss(params, x):
        for p in params:
            x = x + LAYERS[layer](p, x)
        return jnp.mean(x**2)

    step = lambda params, x: mpmd.accumulate_gradients(loss, 2)(params, x)  # noqa: E731
    with jax.set_mesh(jax.make_mesh((2, 2), ("e", "d"), axis_types=(AxisType.Auto,) * 2)):
        want = jax.device_get(jax.jit(step)(PARAMS, X))
    of_layer, rows = SPLITS[split]
    config = mpmd.make_config(
        mpmd.make_topology({"m0": AXES, "m1": AXES}), stages=mpmd.by_parameters(r"(\d+)/.*"),
        schedule=schedule, backend=backend, in_shardings=([of_layer] * 2, rows),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(native compiler|report)")
        got = jax.device_get(mpmd.jit(step, config)(PARAMS, X))
    assert relative_difference(got, want) < 1e-5

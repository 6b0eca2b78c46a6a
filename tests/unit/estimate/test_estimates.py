"""Predictions of steps whose stages span several devices: what is exchanged, and what is held meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from examples.workloads.models import normal
from mpmd.cost.device import HOST
from mpmd.estimate.estimate import predicted_seconds
from mpmd.runtime.program.stream_memory import predict_memory

WIDTH, ROWS, LAYERS, MICROBATCHES = 32, 16, 2, 4
WEIGHTS = LAYERS * WIDTH * WIDTH * 4
SPEED = dataclasses.replace(
    HOST.with_products(1e30),
    levels=((math.inf, 1e30),),
    call_seconds=0.0,
    link_bandwidth=1e3,
    link_seconds=0.0,
)  # exchanges are all that takes time


def lowered(axes, weights=None, is_scanned=False, **options):
    def stage(p, x):
        if is_scanned:
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0]
        for w in p:
            x = jnp.tanh(x @ w)
        return x

    def loss(params, x):
        for s in range(2):
            x = mpmd.named_computation(stage, name=f"stage{s}")(params[s], x)
        return jnp.mean(x)

    def step(params, x):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    config = mpmd.make_config(
        mpmd.make_topology({"m0": axes, "m1": axes}),
        {"stage0": "m0", "stage1": "m1"},
        in_shardings=(weights, P(next(iter(axes)))),
        options=mpmd.PipelineOptions(**options),
    )
    layers = normal(0, LAYERS, WIDTH, WIDTH)
    params = [layers if is_scanned else list(layers)] * 2
    return mpmd.jit(step, config, donate_argnums=0).lower(params, np.ones((ROWS, WIDTH), np.float32))


def named(fragments, word):
    return [seconds for name, seconds in fragments.items() if f"_{word}." in name]


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_reduction_takes_what_a_ring_sends(devices):
    once, each = (lowered({"data": devices}, reduce_gradients=way) for way in ("once", "per_microbatch"))
    costs = once.estimated_costs(SPEED)
    whole = 2 * (devices - 1) / devices * WEIGHTS / SPEED.link_bandwidth
    assert named(costs.fragments, "reduce") == pytest.approx([whole, whole], rel=0.01)
    line = once.schedule(costs)
    assert [span.name for mesh in ("m0", "m1") for span in line.compute(mesh) if "reduce" in span.name]
    before = each.schedule(each.estimated_costs(SPEED))
    assert not named(each.estimated_costs(SPEED).fragments, "reduce")
    assert before.busy_s("m0") - line.busy_s("m0") == pytest.approx((MICROBATCHES - 1) * whole, rel=0.01)


def test_a_gather_takes_and_holds_what_it_gathers():
    split = P("data")
    once, each = (lowered({"data": 2}, split, gather_weights=way) for way in ("once", "per_use"))
    costs = once.estimated_costs(SPEED)
    share = WEIGHTS / 2 / SPEED.link_bandwidth
    assert named(costs.fragments, "gather") == pytest.approx([share, share])
    line, before = (x.schedule(x.estimated_costs(SPEED)) for x in (once, each))
    assert before.makespan_s > 1.5 * line.makespan_s
    most, least = (predict_memory(x.program)[1] for x in (once, each))
    assert most.by_category["gathered"] == 2 * WEIGHTS  # each device holds all
    assert "gathered" not in least.by_category
    assert sum(most.by_category.values()) == most.peak_bytes
    memory = line.memory[1]
    assert memory.at_peak["gathered"] == 2 * WEIGHTS
    assert memory.samples[-1][1][memory.categories.index("gathered")] == 0


@pytest.mark.slow
def test_the_fastest_way_that_fits_is_chosen():
    """Gathers in each microbatch take less memory than reductions in each, but more time."""
    fields = {"gather_weights": ("once", "per_use"), "reduce_gradients": ("once", "per_microbatch")}
    known = {}
    for ways in itertools.product(*fields.values()):
        made = lowered({"data": 2}, P("data"), **dict(zip(fields, ways, strict=True)))
        peak = max(m.peak_bytes // 2 for m in predict_memory(made.program))
        known[ways] = peak, predicted_seconds(made.program, made.partitioned.module, made.config.topology)
    peaks = sorted(peak for peak, _ in known.values())
    assert len(set(peaks)) == 4
    assert known["per_use", "once"][0] < known["once", "per_microbatch"][0]
    for limit in [peaks[0] - 1, *peaks]:
        fitting = [ways for ways in known if known[ways][0] <= limit]
        best = min(fitting, key=lambda ways: known[ways][1]) if fitting else ("per_use", "per_microbatch")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = lowered({"data": 2}, P("data"), device_memory_bytes=limit)
        assert max(m.peak_bytes // 2 for m in predict_memory(made.program)) == known[best][0]
        changed = [f"{n}={way}" for n, way in zip(fields, best, strict=True) if way != "once"]
        said = [str(w.message) for w in caught if "a device would hold" in str(w.message)]
        assert len(said) == bool(changed)
        assert all(" and ".join(changed) + ", as" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_loops_cost_their_iterations(axes, is_scanned):
    speed = dataclasses.replace(SPEED.with_products(1.0), link_bandwidth=1e30)
    split = P(None, None, "model") if is_scanned else P(None, "model")
    made = lowered(axes, split if "model" in axes else None, is_scanned)
    costs = made.estimated_costs(speed).fragments
    (forward,) = (seconds for name, seconds in costs.items() if "stage0_fwd" in name)
    rows, columns = ROWS / MICROBATCHES / 2, WIDTH / axes.get("model", 1)
    assert forward == pytest.approx(LAYERS * rows * columns * (2 * WIDTH + 1), rel=0.1)

"""Stages by cost of models whose layers are in loops over no stack of theirs: shared blocks, nested scans."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import mpmd
from examples.workloads.models import normal
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

D, LAYERS, MICROBATCHES = 16, 8, 4
PARAMS = {"inward": normal(1, 4, D), "stack": 0.3 * normal(2, LAYERS, D, D), "shared": 0.3 * normal(3, D, D)}
X = normal(4, 16, 4)


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def layers(x, rows):
    return jax.lax.scan(layer, x, rows)[0], None


def looped(params, x):
    """The same block again and again, as of a universal transformer."""
    return jax.lax.scan(lambda x, _: layer(x, params["shared"]), x @ params["inward"], length=LAYERS)[0]


def counted(params, x):
    """Random numbers of each iteration, from a key and a counter that it passes on; it keeps a sum."""

    def block(i, state):
        x, key, total = state
        key, own = jax.random.split(key)
        x = layer(x + 0.1 * i * jax.random.normal(own, x.shape), params["shared"])[0]
        return x, key, total + x.mean()

    state = x @ params["inward"], jax.random.key(0), 0.0
    x, _, total = jax.lax.fori_loop(0, LAYERS, block, state)
    return x + total


def over_time(params, x):
    """Each iteration reads a row of what the first stage computes, and returns one."""

    def cell(state, row):
        state = jnp.tanh(state @ params["shared"] + row)
        return state, state

    return jax.lax.scan(cell, jnp.zeros(D), x @ params["inward"])[1]


def reshaped(params, x):
    """Groups of layers, each under a checkpoint: the loss reshapes the stack."""
    groups = params["stack"].reshape(2, LAYERS // 2, D, D)
    return jax.lax.scan(jax.checkpoint(layers), x @ params["inward"], groups)[0]


def nested(params, x):
    """All layers three times: an outer loop, whose iterations share the stack."""
    again = lambda x, _: layers(x, params["stack"][:4])  # noqa: E731
    return jax.lax.scan(jax.checkpoint(again), x @ params["inward"], length=3)[0]


def in_halves(params, x):
    x, _ = layers(x @ params["inward"], params["stack"][:4])
    return layers(jnp.sin(x), params["stack"][4:])[0]


def lowered_of(function, meshes, stages="auto"):
    def loss(params, x):
        return jnp.mean(function(params, x) ** 2)

    def step(params, x):
        return mpmd.accumulate_gradients(loss, MICROBATCHES)(params, x)

    topology = mpmd.make_topology({f"m{m}": 1 for m in range(meshes)})
    config = mpmd.make_config(topology, stages=stages, schedule="1f1b")
    return mpmd.jit(step, config).lower(PARAMS, X), jax.jit(step)(PARAMS, X)


def imbalance(lowered):
    """The work of the heaviest stage, in units of the mean."""
    (text,) = re.findall(r"by stage (.*)", lowered.as_text("stages"))
    unit = {"us": 1, "ms": 1e3, "s": 1e6}
    seconds = [float(number) * unit[of] for number, of in (entry.split() for entry in text.split(", "))]
    return max(seconds) * len(seconds) / sum(seconds)


MODELS = (looped, counted, over_time, reshaped, nested, in_halves)


@pytest.mark.fast_cases("4-nested")
@pytest.mark.parametrize("function", MODELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("meshes", (2, 4))
def test_iterations_are_divided_between_meshes(function, meshes):
    lowered, want = lowered_of(function, meshes)
    assert not lowered.warnings
    assert imbalance(lowered) <= 1.5
    assert relative_difference(mpmd.fetch(lowered.compile()(PARAMS, X)), want) < 1e-5


def rows(lowered):
    """How many rows of the stack each stage reads, of those with some."""
    parts = re.findall(r"stack\[(\d+):(\d+)\]", lowered.as_text("stages"))
    return [int(end) - int(begin) for begin, end in parts]


@pytest.mark.fast_cases("split")
@pytest.mark.parametrize("stages", ("auto", mpmd.split("stack", lengths=(1, 2, 2, 3))), ids=("auto", "split"))
def test_a_mesh_has_its_own_rows_of_a_stack_that_the_loss_reshapes(stages):
    lowered, _ = lowered_of(reshaped, 4, stages)
    assert rows(lowered) == ([2, 2, 2, 2] if stages == "auto" else [1, 2, 2, 3])


def test_a_loop_with_effects_stays_a_loop():
    """JAX differentiates a callback in a scan otherwise than one outside of it."""

    def function(params, x):
        def group(x, rows):
            jax.debug.callback(lambda: None)
            return layers(x, rows)

        groups = params["stack"].reshape(2, LAYERS // 2, D, D)
        return jax.lax.scan(group, x @ params["inward"], groups)[0]

    with pytest.warns(UserWarning, match="not balanced: .*\n  an iteration of scan .* and cannot be divided"):
        lowered, _ = lowered_of(function, 4)
    assert rows(lowered) == [4, 4]


def test_loops_over_no_stack_stay_whole_if_stages_are_balanced_so():
    """Weights of a loop are on one mesh, unless another one would wait for it."""

    def recurrent(params, x):
        first = over_time(params, x)
        return over_time({**params, "inward": params["stack"][0], "shared": params["other"]}, first)

    def loss(params, x):
        return jnp.mean(recurrent(params, x))

    params = {**PARAMS, "other": PARAMS["shared"]}
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), stages="auto")
    text = mpmd.jit(mpmd.staged(loss), config).trace(params, X).stages_text
    assert "shared\n" in text and "other\n" in text and "also read" not in text

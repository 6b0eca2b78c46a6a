"""What the user wants once, and is done in each microbatch, is named with its reason."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.passes.propagation import trial

WEIGHTS, BATCH = (np.ones((4, 4), np.float32),) * 2, np.ones((2, 4, 4), np.float32)


def loss(weights, x):
    h = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="first")(weights[0], x)
    return mpmd.named_computation(lambda w, h: ((h @ w) ** 2).mean(), name="second")(weights[1], h)


def with_parts(weights, x):
    h = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w) + jnp.exp(w), name="first")(weights[0], x)
    return mpmd.named_computation(lambda w, h: ((h @ w) ** 2).mean(), name="second")(weights[1], h)


def signs(grads):
    return jax.tree.map(lambda g: jnp.sign(g), grads)


def warnings_of(change, loss=loss, weights=None, **options):
    """The warnings of a step that adds up changed gradients of its microbatches."""

    def step(weights, batch):
        def one(total, x):
            return jax.tree.map(jnp.add, total, change(jax.grad(loss)(weights, x))), None

        total, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, weights), batch)
        return jax.tree.map(lambda w, g: w - g, weights, total)

    config = mpmd.make_config(
        mpmd.make_topology({"m0": 2, "m1": 2}),
        {"first": "m0", "second": "m1"},
        in_shardings=(weights, P(None, "data")),
        options=mpmd.PipelineOptions(**options),
    )
    with warnings.catch_warnings(action="ignore"):
        return mpmd.jit(step, config).lower(WEIGHTS, BATCH).warnings


def test_a_gradient_of_which_each_sum_is_needed():
    (warning,) = warnings_of(signs, reduce_gradients="once")
    place, _, text = warning.partition(": reduce_gradients is once, but devices add up terms of ")
    assert __file__ in place
    assert text.startswith("result[1], result[0] over 'data' in each microbatch, in 'second' on mesh 'm1', ")
    assert "'first' on mesh 'm0': sign (" in text and "in signs.<locals>.<lambda>) needs the sum" in text


def test_a_weight_of_which_parts_are_read_too():
    (warning,) = warnings_of(lambda grads: grads, with_parts, P("data"), gather_weights="once")
    assert "gather_weights is once, but devices gather weights[0] over 'data' in each microbatch" in warning
    assert warning.endswith("reads its parts") and ": exponential (" in warning


def test_nothing_is_said_where_it_is_done_or_where_the_user_leaves_it_open():
    assert warnings_of(signs) == []
    assert warnings_of(lambda grads: grads, reduce_gradients="once", gather_weights="once") == []


def test_a_step_that_cannot_be_tried_out_says_so(monkeypatch):
    monkeypatch.setattr(trial, "propagation_problem", lambda module: "no sharding fits")
    (warning,) = warnings_of(lambda grads: grads)
    assert "how the step is split cannot be tried out\n  no sharding fits" in warning

"""Haiku's state and random keys that change in a stage: as if it had no name."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import mpmd
from examples.workloads.models import normal
from mpmd.runtime.program.streams import Feed
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

X = normal(1, 8, 4, scale=1.0)
CONFIG = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"s0": "m0", "s1": "m1"})


def block(x):
    """Creates its modules while it is called; its statistics and the sequence of keys change."""
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(hk.Linear(4)(x), is_training=True)
    return jnp.tanh(x) * jax.random.bernoulli(hk.next_rng_key(), 0.9, x.shape)


def model(named):
    def forward(x):
        for k in range(2):
            x = mpmd.named_computation(block, name=f"s{k}")(x) if named else block(x)
        return x + hk.get_parameter("shift", (4,), init=jnp.zeros)

    return hk.transform_with_state(forward)


def gradients(named):
    def loss(params, state, key, x):
        y, state = model(named).apply(params, state, key, x)
        return jnp.mean(y**2), state

    return jax.value_and_grad(loss, has_aux=True)


def feeds_of(program, stream):
    """The arguments that a stream reads."""
    return [program.inputs[op.input].path for op in stream.instructions if isinstance(op, Feed)]


def test_stages_change_state_and_keys_as_without_names():
    params, state = model(False).init(jax.random.key(2), X)
    assert relative_difference(model(True).init(jax.random.key(2), X), (params, state)) == 0
    arguments = params, state, jax.random.key(3), X
    expected = jax.jit(gradients(False))(*arguments)
    assert relative_difference(jax.jit(gradients(True))(*arguments), expected) <= 1e-6
    lowered = mpmd.jit(gradients(True), CONFIG).lower(*arguments)
    assert relative_difference(lowered.compile()(*arguments), expected) <= 1e-5
    fed = [path for s in lowered.program.streams for path in feeds_of(lowered.program, s) if s.mesh == "m0"]
    assert fed and not any("norm_1" in path or "linear_1" in path for path in fed)


@pytest.mark.slow
def test_microbatches_share_the_state_of_the_step():
    params, state = model(False).init(jax.random.key(2), X)

    def step(params, state, key, x):
        def loss(params, x):
            return jnp.mean(model(True).apply(params, state, key, x)[0] ** 2)

        return mpmd.accumulate_gradients(loss, 2)(params, x)

    arguments = params, state, jax.random.key(3), X
    assert relative_difference(mpmd.jit(step, CONFIG)(*arguments), jax.jit(step)(*arguments)) <= 1e-5

"""Operations that bring functions of their own: composites, and custom calls that call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import mpmd
from tests.support.comparing import relative_difference

pytestmark = pytest.mark.usefixtures("plain_xla")

BACKENDS = ("native", "xla")


def pipelined(step, backend):
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    return mpmd.jit(step, mpmd.make_config(topology, {"lower": "m0", "upper": "m1"}, backend=backend))


@functools.partial(jax.lax.composite, name="tests.wave")
def wave(x, *, height):
    return jnp.sin(x) * height + jax.jit(jnp.cos)(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_composite_within_a_name_and_between_names(backend):
    lower = mpmd.named_computation(lambda x: wave(x, height=3.0), name="lower")
    upper = mpmd.named_computation(lambda x: x * 2, name="upper")

    def step(x):
        return upper(wave(lower(x), height=2.0))

    x = jnp.arange(8.0).reshape(2, 4)
    assert relative_difference(pipelined(step, backend)(x), jax.jit(step)(x)) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_approximate_top_k_under_gradients_and_without_a_name(backend):
    """Its comparison is a function that nothing calls but the custom call; XLA ends without it."""
    lower = mpmd.named_computation(lambda w, x: jax.lax.approx_max_k(x @ w, 3)[0], name="lower")
    upper = mpmd.named_computation(lambda h: jnp.mean(h**2), name="upper")

    def step(w, x):
        loss, grads = mpmd.accumulate_gradients(lambda w, x: upper(lower(w, x)), 2)(w, x)
        return loss, grads, jax.lax.approx_min_k(x, 2)

    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (9, 9)), jax.random.normal(keys[1], (4, 9))
    got, want = pipelined(step, backend)(w, x), jax.jit(step)(w, x)
    assert relative_difference(got, want) < 1e-5

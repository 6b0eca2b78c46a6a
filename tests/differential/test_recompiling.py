"""A process that compiles a step for ever new shapes, and forgets each, does not grow.

Our objects are counted, and what malloc has given out, per shape and beside what `jax.jit` keeps itself.
"""

from __future__ import annotations

import collections
import gc
import itertools

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.runtime import host_memory

WARM = 16  # as many as there are micro-kernels for remainders of rows, which stay
SHAPES = 24
ROUNDS = 3


def loss(w, x):
    h = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="a")(w, x)
    return mpmd.named_computation(lambda w, x: jnp.mean((x @ w) ** 2), name="b")(w, h)


def grown(step) -> tuple[dict[str, int], float]:
    """Our objects, by type, and bytes of malloc per shape, that stay after many shapes.

    Programs that XLA may still call are unloaded later, a few at a time, so that the least of several rounds
    is what each round adds.
    """

    def run(shapes: range) -> None:
        for rows in shapes:
            jax.block_until_ready(step(jnp.eye(16), jnp.ones((rows, 16))))
            step.clear_cache()
            jax.clear_caches()

    def counted() -> tuple[collections.Counter[str], int]:
        run(range(8, 9))
        for _ in range(3):
            gc.collect()
        names = (f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())
        return collections.Counter(n for n in names if n.startswith("mpmd.")), host_memory.given_out()

    run(range(9, 9 + WARM))
    found = [counted()]
    for number in range(ROUNDS):
        first = 9 + WARM + number * SHAPES
        run(range(first, first + SHAPES))
        found.append(counted())
    least = min(after - before for (_, before), (_, after) in itertools.pairwise(found))
    return dict(found[-1][0] - found[0][0]), least / SHAPES


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_shapes_that_were_forgotten_leave_nothing():
    if host_memory.freed_memory() is None:
        pytest.skip("this C library does not say what it has given out")
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    config = mpmd.make_config(topology, {"a": "m0", "b": "m1"}, backend="native")
    _, bytes_of_jax = grown(jax.jit(jax.value_and_grad(loss)))
    objects, bytes_of_ours = grown(mpmd.jit(jax.value_and_grad(loss), config))
    assert max(objects.values(), default=0) < SHAPES * ROUNDS / 4, objects
    assert bytes_of_ours <= max(0.0, bytes_of_jax) + 20_000, f"jax.jit keeps {bytes_of_jax:.0f}"

"""A process that compiles a step for ever new shapes, and forgets each, does not grow.

Our objects are counted, and the blocks of Python and bytes of malloc that stay per shape, beside those that
`jax.jit` leaves itself.  Those are not 0: `jax.clear_caches` does not clear `_seen_qdds` of JAX 0.10, which
has an entry for each function of `jax.numpy` and the shapes of its arguments.
"""

from __future__ import annotations

import collections
import gc
import itertools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import mpmd
from mpmd.runtime.run import host_memory

WARM = 16  # as many as there are micro-kernels for remainders of rows, which stay
SHAPES = 24
ROUNDS = 3


def loss(w, x):
    h = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="a")(w, x)
    return mpmd.named_computation(lambda w, x: jnp.mean((x @ w) ** 2), name="b")(w, h)


class Growth(NamedTuple):
    """What stays after many shapes: our objects by type; per shape, blocks of Python and bytes of malloc."""

    objects: dict[str, int]
    blocks: float
    bytes: float


def grown(step) -> Growth:
    """What a step leaves.

    Programs that XLA may still call are unloaded later, a few at a time, so that the least of several rounds
    is what each round adds.
    """

    def run(shapes: range) -> None:
        for rows in shapes:
            jax.block_until_ready(step(jnp.eye(16), jnp.ones((rows, 16))))
            step.clear_cache()
            jax.clear_caches()

    def counted() -> tuple[collections.Counter[str], int, int]:
        run(range(8, 9))
        for _ in range(3):
            gc.collect()
        blocks, given_out = sys.getallocatedblocks(), host_memory.given_out()
        names = (f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())
        return collections.Counter(n for n in names if n.startswith("mpmd.")), blocks, given_out

    run(range(9, 9 + WARM))
    found = [counted()]
    for number in range(ROUNDS):
        first = 9 + WARM + number * SHAPES
        run(range(first, first + SHAPES))
        found.append(counted())
    steps = list(itertools.pairwise(found))
    blocks, bytes_ = (min(after[k] - before[k] for before, after in steps) / SHAPES for k in (1, 2))
    return Growth(dict(found[-1][0] - found[0][0]), blocks, bytes_)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_shapes_that_were_forgotten_leave_nothing():
    if host_memory.freed_memory() is None:
        pytest.skip("this C library does not say what it has given out")
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    config = mpmd.make_config(topology, {"a": "m0", "b": "m1"}, backend="native")
    theirs = grown(jax.jit(jax.value_and_grad(loss)))
    ours = grown(mpmd.jit(jax.value_and_grad(loss), config))
    assert max(ours.objects.values(), default=0) < SHAPES * ROUNDS / 4, ours
    assert ours.blocks <= theirs.blocks + 40, (ours, theirs)
    assert ours.bytes <= max(0.0, theirs.bytes) + 8_000, (ours, theirs)

"""A model of another library as it is: two training steps in stages against those under `jax.jit`."""

from __future__ import annotations

import jax
import numpy as np
import optax

import mpmd
from tests.support.comparing import copied, relative_difference

MICROBATCHES = 4


def check_recipe(params, loss, batch, stages, *, meshes=2, optimizer=None, tolerance=2e-5, tied=()):
    """Trains an unmodified model for two steps.

    Args:
        params: a pytree of arrays, as the library returns it.
        loss: `loss(params, *batch)`.
        batch: arrays of `8` rows.
        stages: the recipe: what is said to `mpmd.make_config`.
        meshes: how many meshes.
        optimizer: of optax; Adam by default.
        tolerance: the largest relative difference of a leaf; gradients are added in another order.
        tied: shapes of parameters that several stages use, and so may be sent.

    Returns:
        The lowered step.
    """
    optimizer = optimizer or optax.adam(1e-2, eps=1e-3)

    def step(params, state, *batch):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.tree.map(np.asarray, params)
    state = jax.tree.map(np.asarray, optimizer.init(params))
    topology = mpmd.make_topology({f"m{s}": 1 for s in range(meshes)})
    ours = mpmd.jit(step, mpmd.make_config(topology, stages=stages), donate_argnums=(0, 1))
    lowered = ours.lower(params, state, *batch)
    assert all(tied and "It is sent in every step" in warning for warning in lowered.warnings)
    weights = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim > 1} - set(tied)
    sent = [kind.shape for channel in lowered.program.channels for kind in channel.types]
    assert not weights.intersection(sent), "a parameter or its gradient is sent"
    want, got = (params, state), copied((params, state))
    for _ in range(2):
        *want, want_loss = jax.jit(step)(*want, *batch)
        *got, got_loss = ours(*got, *batch)
    assert relative_difference(whole(got), want) <= tolerance
    assert relative_difference(got_loss, want_loss) <= tolerance
    return lowered


def whole(tree):
    """A pytree with NumPy arrays, also for stacks in parts."""
    return jax.tree.map(np.asarray, tree, is_leaf=lambda leaf: isinstance(leaf, mpmd.Stacked))


def token_batch(words, rows=8, length=12):
    """Token ids `i32[rows,length]`, none of them 0."""
    return jax.random.randint(jax.random.key(0), (rows, length), 1, words)

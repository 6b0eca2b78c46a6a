"""Steps under `mpmd.jit` against the same steps under `jax.jit`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def relative_difference(got, want) -> float:
    """The largest ‖a−b‖/‖b‖ over the leaves of two pytrees.

    Leaves that are zero but for rounding, as the gradient of a key bias is, are judged against the norm
    of all leaves.
    """
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(got, want)]
    for a, b in pairs:
        assert a.shape == b.shape
    total = np.sqrt(sum(float((b**2).sum()) for _, b in pairs))
    worst = 0.0
    for a, b in pairs:
        norm = float(np.linalg.norm(b))
        scale = norm if norm > 1e-6 * total else total
        difference = float(np.linalg.norm(a - b))
        worst = max(worst, difference / scale if scale else difference)
    return worst


def run_steps(step, state, batches):
    """The states and losses of a few steps; `step(state, *batch) -> (state, loss)`."""
    losses = []
    for batch in batches:
        state, loss = step(state, *batch)
        losses.append(loss)
    return state, losses


def sgd_momentum(learning_rate: float = 0.05, momentum: float = 0.9):
    """`init(params) -> state` and `update(state, grads) -> state`, a state being `(params, velocity)`."""

    def init(params):
        return params, jax.tree.map(jnp.zeros_like, params)

    def update(state, grads):
        params, velocity = state
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: (p - learning_rate * v).astype(p.dtype), params, velocity), velocity

    return init, update


def copied(tree):
    """Fresh host copies of all arrays, so that donation cannot reach the originals."""
    return jax.tree.map(np.array, tree)

"""Training steps of a loss, and a step under `mpmd.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import mpmd


def pipelined(step, stages: int, schedule: str = "1f1b", mesh: Any = 1, options=None, **jit_options):
    """`step` under `mpmd.jit` with `stage0` on mesh `m0`, and so on; `mesh` is what each mesh is made of."""
    topology = mpmd.make_topology({f"m{s}": mesh for s in range(stages)})
    assignment = {f"stage{s}": f"m{s}" for s in range(stages)}
    config = mpmd.make_config(topology, assignment, schedule=schedule, **(options or {}))
    return mpmd.jit(step, config, **jit_options)


def training_step(loss, num_microbatches: int, update):
    """`step(state, *batch) -> (state, loss)` with accumulated gradients; `state[0]` are the parameters."""

    def step(state, *batch):
        value, grads = mpmd.accumulate_gradients(loss, num_microbatches)(state[0], *batch)
        return update(state, grads), value

    return step


def sgd_momentum(learning_rate: float = 0.05, momentum: float = 0.9):
    """`init(params) -> state` and `update(state, grads) -> state`, a state being `(params, velocity)`."""

    def init(params):
        return params, jax.tree.map(jnp.zeros_like, params)

    def update(state, grads):
        params, velocity = state
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: (p - learning_rate * v).astype(p.dtype), params, velocity), velocity

    return init, update

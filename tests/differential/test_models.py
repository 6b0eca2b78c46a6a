"""Every model gives `jax.jit`'s gradients and training, on every kind of pipeline."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import mpmd
from tests.support.comparing import copied, relative_difference, run_steps, sgd_momentum
from tests.support.models import MODELS


def pipelined(step, stages: int, schedule: str = "1f1b", **options):
    """`step` on one mesh per stage."""
    topology = mpmd.make_topology({f"m{s}": 1 for s in range(stages)})
    config = mpmd.make_config(topology, {f"stage{s}": f"m{s}" for s in range(stages)}, schedule=schedule)
    return mpmd.jit(step, config, **options)


@pytest.mark.parametrize("name", MODELS)
def test_first_gradients_are_those_of_jit(name):
    model = MODELS[name]
    params, loss, batch = model.build(2)

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, 4)(params, *batch)

    got = pipelined(step, 2)(params, *batch)
    assert relative_difference(got, jax.jit(step)(params, *batch)) <= model.tolerance


@pytest.mark.parametrize("name", MODELS)
def test_training_with_momentum_is_that_of_jit(name):
    model = MODELS[name]
    params, loss, batch = model.build(3)
    init, update = sgd_momentum()

    def step(state, *batch):
        value, grads = mpmd.accumulate_gradients(loss, 4)(state[0], *batch)
        return update(state, grads), value

    batches = [batch] * 20
    want = run_steps(jax.jit(step), init(params), batches)
    got = run_steps(pipelined(step, 3, donate_argnums=0), copied(init(params)), batches)
    tolerance = model.tolerance
    assert relative_difference(got, want) <= tolerance
    assert np.isfinite(np.asarray(want[1])).all()

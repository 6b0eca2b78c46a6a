"""Every model gives `jax.jit`'s gradients and training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.workloads.flax_models import FLAX_MODELS
from examples.workloads.models import MODELS
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from tests.support.comparing import STEPS, check_training, copied, relative_difference, run_steps

pytestmark = pytest.mark.usefixtures("plain_xla")

ALL = MODELS | FLAX_MODELS
THREE_STAGES = {"mlp", "skip", "shapes_change", "stacked"}
SLOW = {"tied", "custom_gradient", "scanned_layers"}  # the fast tests have others like them


@pytest.mark.fast_cases("skip-3", "half_precision-2", "checkpointed_whole-2")
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(n, s, marks=[] if s == 2 + (n in THREE_STAGES) and n not in SLOW else pytest.mark.slow)
        for n in ALL
        for s in (2, 3)
    ],
)
def test_gradients_and_training_with_momentum_are_those_of_jit(name, stages):
    model = ALL[name]
    params, loss, batch = model.build(stages)
    init, update = sgd_momentum()
    step = training_step(loss, 4, update)
    check_training(
        pipelined(step, stages, donate_argnums=0), jax.jit(step), init(params), batch, model.tolerance
    )


def adamw_with_clipping():
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    def init(params):
        return params, optimizer.init(jax.tree.map(jnp.asarray, params))

    def update(state, grads):
        params, inner = state
        updates, inner = optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner

    return init, update


@pytest.mark.parametrize("name", [n if n == "mlp" else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_the_loss_curve_of_adamw_with_clipping_is_that_of_jit(name):
    """The norm of all gradients is reduced across meshes without being asked for."""
    model = ALL[name]
    params, loss, batch = model.build(2)
    init, update = adamw_with_clipping()
    step = training_step(loss, 4, update)
    batches = [batch] * STEPS
    _, want = run_steps(jax.jit(step), init(params), batches)
    _, got = run_steps(pipelined(step, 2, donate_argnums=0), copied(init(params)), batches)
    assert np.asarray(want)[-1] < np.asarray(want)[0]
    assert relative_difference(np.asarray(got), np.asarray(want)) <= max(1e-4, model.tolerance)

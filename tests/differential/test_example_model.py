"""The transformer of the example trains through the pipeline as it does under `jax.jit`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pipelined_transformer.config import TrainConfig
from examples.pipelined_transformer.model import init_params
from examples.pipelined_transformer.train_step import (
    make_plain_step,
    make_state,
    make_train_step,
    pipelined_loss,
)
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from tests.support.comparing import STEPS, check_training, copied, relative_difference, run_steps

pytestmark = pytest.mark.usefixtures("plain_xla")


def configuration(stages, **changes):
    small = {
        "num_stages": stages, "num_microbatches": 4, "layers": 4, "d_model": 32, "heads": 4, "seq_len": 16,
        "batch_size": 8, "vocab_size": 270, "warmup_steps": 2, "steps": STEPS,
    }  # fmt: skip
    return TrainConfig(**{**small, **changes})


def batches(config, count):
    rng = np.random.default_rng(0)
    shape = count, config.batch_size, config.seq_len + 1
    return list(rng.integers(0, config.vocab_size, shape).astype(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_gradients_and_training_with_momentum_are_those_of_jit(stages):
    """Three stages hold two, one and one blocks; the token table is used by the first and the last."""
    config = configuration(stages)
    params = jax.device_get(jax.jit(lambda: init_params(config, 0))())
    init, update = sgd_momentum()
    step = training_step(pipelined_loss(config), config.num_microbatches, update)
    jitted = pipelined(step, stages, donate_argnums=0)
    check_training(jitted, jax.jit(step), init(params), batches(config, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-4),
        ({"devices_per_mesh": 2}, 1e-4),
        ({"schedule": "gpipe"}, 1e-4),
        ({"dtype": "bfloat16"}, 3e-2),
    ],
)
def test_the_loss_curve_of_its_own_optimizer_is_that_of_jit(changes, tolerance):
    """AdamW with warm-up and decay behind clipping by global norm, on another batch in every step."""
    config = configuration(2, **changes)
    state = jax.device_get(make_state(config))
    each = [(batch,) for batch in batches(config, STEPS)]
    _, want = run_steps(make_plain_step(config), jax.tree.map(jnp.array, state), each)
    _, got = run_steps(make_train_step(config), copied(state), each)
    assert relative_difference(np.asarray(got), np.asarray(want)) <= tolerance

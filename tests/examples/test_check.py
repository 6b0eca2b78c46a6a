"""The comparison with plain jax.jit measures what it says, and fails when the pipeline is wrong."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from examples.pipelined_transformer.check import Check, CheckError, parameter_differences
from examples.pipelined_transformer.train_step import make_plain_step, make_state, make_train_step


@pytest.fixture(scope="module")
def step_one(tiny):
    """A configuration, the state before a step, a batch, and what the step makes of them."""
    config = tiny()
    before = jax.device_get(make_state(config))
    batch = np.random.default_rng(0).integers(0, 270, (4, config.seq_len + 1)).astype(np.int32)
    after, loss = jax.device_get(make_plain_step(config)(before, batch))
    return config, before, batch, after, loss


def changed(params, name, factor):
    def change(path, leaf):
        return leaf * factor if name in jax.tree_util.keystr(path) else leaf

    return jax.tree_util.tree_map_with_path(change, params)


def test_equal_steps_do_not_differ(step_one):
    config, before, batch, after, loss = step_one
    check = Check(config, before, batch)
    assert check.compare(1, batch, after, loss) == 0.0
    assert check.max_rel_diff == 0.0 and len(check.seconds) == 1


def test_a_difference_is_relative_to_its_leaf(step_one):
    _, _, _, after, _ = step_one
    found = parameter_differences(changed(after.params, "positions", np.float32(1.5)), after)
    assert found.pop("['positions']['embedding']") == pytest.approx(0.5, rel=1e-6)
    assert set(found.values()) == {0.0}


def test_a_leaf_without_gradient_is_judged_against_all_parameters(step_one):
    _, _, _, after, _ = step_one
    adam = after.opt_state[1][0]
    mu = changed(adam.mu, "positions", 0.0)
    still = after.replace(opt_state=(after.opt_state[0], (adam._replace(mu=mu), *after.opt_state[1][1:])))
    params = changed(after.params, "positions", np.float32(1.5))
    ours = parameter_differences(params, after)["['positions']['embedding']"]
    judged = parameter_differences(params, still)["['positions']['embedding']"]
    norm = np.sqrt(sum(float((leaf.astype(np.float64) ** 2).sum()) for leaf in jax.tree.leaves(after.params)))
    leaf = np.linalg.norm(after.params["positions"]["embedding"].astype(np.float64))
    assert judged == pytest.approx(ours * leaf / norm, rel=1e-6) and judged < ours


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_a_wrong_parameter_ends_the_run(step_one, factor):
    config, before, batch, after, loss = step_one
    wrong = after.replace(params=changed(after.params, "block_1']['up']['kernel", np.float32(factor)))
    with pytest.raises(CheckError) as error:
        Check(config, before, batch).compare(1, batch, wrong, loss)
    assert str(error.value).splitlines()[:2] == [
        "step 1 of the pipeline differs from plain jax.jit",
        "  where: ['block_1']['up']['kernel']",
    ]


def test_a_wrong_loss_ends_the_run(step_one):
    config, before, batch, after, loss = step_one
    with pytest.raises(
        CheckError, match=r"^step 7 of the pipeline differs from plain jax\.jit\n  where: loss\n"
    ):
        Check(config, before, batch).compare(7, batch, after, loss * 1.01)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("devices", (1, 2))
def test_every_fragment_of_a_training_step_agrees_with_xla(tiny, dtype, devices):
    config = tiny(dtype=dtype, devices_per_mesh=devices)
    rng = np.random.default_rng(0)
    shape = (config.batch_size, config.seq_len + 1)
    batch = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    state = make_state(config)
    report = make_train_step(config).compiled(state, batch).compare(state, batch)
    assert report and report.fragments > 4, str(report)

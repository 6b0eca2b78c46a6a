"""One state, and steps compiled for several lengths of rows: one division into stages, one plan of memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import mpmd
from examples.llm.model import Llama
from mpmd.errors import ConfigError

MODEL = Llama(vocab=256, width=16, layers=4, heads=2, kv_heads=1, hidden=32, dtype="float32")
PARAMS = jax.eval_shape(lambda: MODEL.init(jax.random.key(0)))
SHORT, LONG = 8, 16


def step(params, batch):
    loss, grads = mpmd.accumulate_gradients(MODEL.loss, 2, weighted=True)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def batch_of(length):
    rng = np.random.default_rng(length)
    ids, targets = rng.integers(0, 256, (2, 4, length)).astype(np.int32)
    segments = np.sort(rng.integers(0, 4, (4, length)), axis=1)[:, ::-1].astype(np.int32)
    return {"ids": ids, "targets": targets, "segments": segments, "positions": np.cumsum(segments > 0, 1)}


def on_two_meshes(stages, fn=step):
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    return mpmd.jit(fn, mpmd.make_config(topology, stages=stages, schedule="1f1b"), donate_argnums=0)


@pytest.fixture(scope="module")
def found():
    """The stages that are found for the longer rows."""
    return on_two_meshes("auto").lower(PARAMS, batch_of(LONG)).stages


def rows_on_first(stages, length):
    """How many layers the first mesh has."""
    text = on_two_meshes(stages).trace(PARAMS, batch_of(length)).stages_text
    return next(k for k in range(1, 5) if f"layers/down[0:{k}]" in text)


def test_the_stages_of_one_length_are_those_of_all(found):
    assert (rows_on_first("auto", SHORT), rows_on_first("auto", LONG)) == (3, 2)  # the state would move
    assert rows_on_first(found, SHORT) == 2


@pytest.mark.slow
def test_stages_that_are_not_found_by_cost_are_as_given():
    split = mpmd.split("layers")
    assert str(on_two_meshes(split).lower(PARAMS, batch_of(SHORT)).stages) == str(split)


def test_the_stages_of_another_loss_are_refused(found):
    def regularised(params, batch):
        total, count = MODEL.loss(params, batch)
        return total + 0.1 * (params["head"] ** 2).sum(), count

    def other(params, batch):
        return mpmd.accumulate_gradients(regularised, 2, weighted=True)(params, batch)

    with pytest.raises(
        ConfigError, match=r"^regularised has \d+ operations; the stages were found for loss with"
    ):
        on_two_meshes(found, other).trace(PARAMS, batch_of(SHORT))


@pytest.mark.slow
def test_lengths_share_the_state_and_the_memory(found):
    train_step = on_two_meshes(found)
    short, long = (train_step.compiled(PARAMS, batch_of(length)) for length in (SHORT, LONG))
    of_state = [list(map(str, jax.tree.leaves(of.input_shardings[0][0]))) for of in (short, long)]
    assert of_state[0] == of_state[1]

    each, both = (short.memory_analysis(), long.memory_analysis()), long.memory_analysis(short)
    for mesh, memory in both.items():
        of_each = [of[mesh] for of in each]
        live = memory.peak_bytes - memory.kept_bytes
        assert live == max(one.peak_bytes - one.kept_bytes for one in of_each)
        assert (
            max(one.kept_bytes for one in of_each)
            <= memory.kept_bytes
            <= sum(one.kept_bytes for one in of_each)
        )
        assert memory.peak_bytes < sum(one.peak_bytes for one in of_each)

    rng, plain = np.random.default_rng(0), jax.jit(step)
    state = expected = jax.tree.map(lambda of: rng.uniform(-0.1, 0.2, of.shape).astype(of.dtype), PARAMS)
    for length in (LONG, SHORT, LONG):
        (state, loss), (expected, wanted) = (
            train_step(state, batch_of(length)),
            plain(expected, batch_of(length)),
        )
        assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    for ours, theirs in zip(jax.tree.leaves(mpmd.fetch(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)

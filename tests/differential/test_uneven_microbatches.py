"""Packed rows, and tokens that do not count: loss and gradients of the whole batch.

Source: means of means are reported as AReaL #1273 and Automodel #3530.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import mpmd
from examples.llm.model import Llama

MODEL = Llama(vocab=32, width=16, layers=2, heads=2, kv_heads=1, hidden=32, dtype="float32")
ROWS, LENGTH = 8, 16


def packed_batch():
    """Rows of a few segments, and of more padding the later they come."""
    rng = np.random.default_rng(0)
    names = "ids", "targets", "segments", "positions"
    batch = {name: np.zeros((ROWS, LENGTH), np.int32) for name in names}
    for row in range(ROWS):
        ends = np.sort(rng.choice(np.arange(1, LENGTH - 2 * (row // 2)), 3, replace=False))
        for segment, (begin, end) in enumerate(zip((0, *ends), ends), 1):
            values = rng.integers(1, 32, (2, end - begin)), segment, np.arange(end - begin)
            for name, value in zip(names, (*values[0], *values[1:]), strict=True):
                batch[name][row, begin:end] = value
    return batch


def step(params, batch):
    loss, grads = mpmd.accumulate_gradients(MODEL.loss, 4, weighted=True)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@jax.jit
def whole_batch(params, batch):
    def mean(params):
        total, count = MODEL.loss(params, batch)
        return total / count

    loss, grads = jax.value_and_grad(mean)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.slow  # tests/examples/test_language_model.py has one case that is not
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("stages", ["auto", "split", "rows"])
def test_packed_rows_in_stages_from_outside(stages, devices):
    rng, shapes = np.random.default_rng(1), jax.eval_shape(lambda: MODEL.init(jax.random.key(0)))
    params = jax.tree.map(lambda of: rng.uniform(-0.2, 0.4, of.shape).astype(of.dtype), shapes)
    batch = packed_batch()
    counts = [int((rows > 0).sum()) for rows in np.split(batch["segments"], 4)]
    assert len(set(counts)) == 4
    how = {"auto": "auto", "split": mpmd.split("layers"), "rows": mpmd.by_cost(over=("m0", "m1", "m0", "m1"))}
    config = mpmd.make_config(
        mpmd.make_topology({"m0": devices, "m1": devices}),
        stages=how[stages],
        schedule="interleaved_1f1b" if stages == "rows" else "1f1b",
        in_shardings=(None, PartitionSpec("data")) if devices > 1 else None,
    )
    got, loss = mpmd.fetch(mpmd.jit(step, config)(params, batch))
    expected, expected_loss = whole_batch(params, batch)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
def test_attention_within_segments_by_names_and_auxiliary_results():
    """A weight and an auxiliary result for each microbatch, of a model whose stages have names."""

    def attend(w, x, segments):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
        return x + jax.nn.dot_product_attention(*(t[:, :, None] for t in (q, k, v)), mask=mask)[:, :, 0]

    def loss(params, x, segments):
        for k, w in enumerate(params):
            x = mpmd.named_computation(attend, name=f"layer{k}")(w, x, segments)
        counts = (segments > 0).sum(-1)
        return (((x**2).mean(-1) * (segments > 0)).sum(), counts.sum()), counts

    def step(params, x, segments):
        (mean, counts), grads = mpmd.accumulate_gradients(loss, 4, has_aux=True, weighted=True)(
            params, x, segments
        )
        return mean, counts, grads

    def plain(params, x, segments):
        def mean(params):
            (total, count), counts = loss(params, x, segments)
            return total / count, counts.reshape(4, -1)

        (value, counts), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return value, counts, grads

    rng, segments = np.random.default_rng(2), packed_batch()["segments"]
    params = [rng.uniform(-0.3, 0.3, (8, 24)).astype(np.float32) for _ in range(2)]
    x = rng.uniform(-1, 1, (ROWS, LENGTH, 8)).astype(np.float32)
    topology = mpmd.make_topology({"m0": 1, "m1": 1})
    config = mpmd.make_config(topology, {"layer0": "m0", "layer1": "m1"}, schedule="1f1b")
    got, expected = mpmd.jit(step, config)(params, x, segments), jax.jit(plain)(params, x, segments)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(jax.device_get(ours), theirs, rtol=1e-4, atol=1e-6)

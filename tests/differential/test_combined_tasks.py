"""A forward of one microbatch and a backward of another in one program."""

from __future__ import annotations

import re
from collections import Counter

import jax
import numpy as np
import pytest

import mpmd
from examples.workloads.models import normal
from tests.support.comparing import relative_difference
from tests.support.evaluate_mpmd import evaluate

pytestmark = pytest.mark.usefixtures("plain_xla")

MICROBATCHES = 8


def loss_fn(params, x):
    for w in params["layers"]:
        x = jax.numpy.tanh(x @ w)
    return (x**2).mean()


def step(params, x):
    loss, grads = mpmd.accumulate_gradients(loss_fn, MICROBATCHES)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


GIVEN = {"layers": [normal(k, 4, 4) for k in range(3)]}, normal(9, 2 * MICROBATCHES, 4)


def lowered_by(schedule):
    topology = mpmd.make_topology({f"m{m}": 1 for m in range(3)})
    config = mpmd.make_config(topology, stages=mpmd.by_parameters(r"layers/(\d+)"), schedule=schedule)
    return mpmd.jit(step, config).lower(*GIVEN)


def test_it_computes_what_jax_does_in_fewer_programs_and_no_mesh_waits():
    """Each mesh runs ahead so far that its pairs do not wait for those of its neighbours in turns."""
    lowered = lowered_by("combined_1f1b")
    got = evaluate(lowered.partitioned.module, jax.tree.leaves(GIVEN))
    assert relative_difference(got, jax.tree.leaves(jax.jit(step)(*GIVEN))) < 1e-5
    assert not lowered.warnings
    ran = Counter(re.findall(r" run \w+?_(stage\d_\w+?)_calls?\d", lowered.as_text("program")))
    for stage, following in enumerate((2, 1, 0)):
        ahead = 2 * following + 1
        assert ran[f"stage{stage}_fwd_bwd"] == MICROBATCHES - ahead, ran
        assert ran[f"stage{stage}_fwd"] == ran[f"stage{stage}_bwd"] == ahead
    timeline = lowered.schedule({name: 3.0 if "fwd_bwd" in name else 1.0 for name in lowered.fragments})
    spans = [span for span in timeline.compute("m1") if "stage1" in span.name]
    assert np.allclose([a.end_s for a in spans[:-1]], [b.start_s for b in spans[1:]])


def test_the_last_forward_and_its_backward_stay_one_program():
    """One microbatch has no other to be combined with."""
    topology = mpmd.make_topology({"m0": 1, "m1": 1, "m2": 1})
    config = mpmd.make_config(topology, stages=mpmd.by_parameters(r"layers/(\d+)"), schedule="combined_1f1b")
    alone = lambda params, x: mpmd.accumulate_gradients(loss_fn, 1)(params, x)
    text = mpmd.jit(alone, config).lower(*GIVEN).as_text("program")
    assert len(re.findall(r" run \w*stage2_fwd_bwd", text)) == 1
